"""Mistakes in a configuration are refused in one line with exit code 2, before anything is written."""

import importlib.util
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.messages import check_message, exit_code, refused

from sage.io.files import config_dir
from train.cli.train import main
from train.config.checks import check
from train.config.hydra_app import App, compose, read_jobs
from train.config.schema import Config, ConfigError

SWEEP_FILES = sorted((config_dir() / "sweep").glob("*.yaml"))


WRONG = {  # of values out of range one per kind of key: a key's range is stated once, beside its type
    "+train.foo=1": ["train.foo:"],
    "tracking.project=x": ["tracking.project:", "tracking=wandb"],
    "deepspeed.extra.wall_clock_breakdown=true": ["+deepspeed.extra.wall_clock_breakdown=VALUE"],
    "train.max_steps=1.5": ["train.max_steps=1.5:", "an integer of at least 1 or null"],
    "optim.schedule=step": ["optim.schedule=step:", "one of constant, cosine"],
    "draft=eagle draft.input_norm=maybe": ["draft.input_norm:", "true or false"],
    "decode.policies=[sgae]": ["decode.policies[0]=sgae:", "sage"],
    "draft=eagel": ["draft=eagel:", "draft=eagle"],
    "train.global_batch_size=???": ["train.global_batch_size:"],
    "run.dir=": ["run.dir=:"],
    "target.path=/no/such/folder": ["target.path=/no/such/folder:"],
    "draft.path=./nothing": ["draft.path: ./nothing:", "RUN/draft_best"],
    "data=llava_instruct": ["data.path:"],
    "train.global_batch_size=6": ["train.global_batch_size=6:"],
    "train.micro_batch_tokens=2048 train.micro_batch_size=2": ["train.micro_batch_size=2:", "train.micro_batch_tokens"],
    "train.micro_batch_tokens=2048 launch.ranks=3": ["train.global_batch_size=128:", "3 rank(s)"],
    "train.micro_batch_tokens=2048 data=hub data.path=x/y data.sources.hub.streaming=true data.cache=rows": [
        "train.micro_batch_tokens=2048:",
        "train.micro_batch_size",
    ],
    "+deepspeed.extra.train_batch_size=1": ["deepspeed.extra.train_batch_size:"],
    "decode.couple=false": ["decode.couple=false:", "decode.temperature=0"],
    "decode.assistant=/no/such": ["decode.assistant=/no/such:"],
    "decode.policies=[sage,sage]": ["decode.policies=sage,sage:"],
    "draft.num_attention_heads=6 draft.num_key_value_heads=4": ["draft.num_key_value_heads=4:"],
    "launch.gpus=2 launch.ranks=4": ["launch.ranks=4:"],
    "objective.ce_weight=0 objective.feature_weight=0": ["objective.ce_weight=0", "objective.feature_weight=0"],
    "draft=eagle3 objective=distill": ["objective.feature_weight=1.0:"],
    "draft=eagle3 draft.feature_levels=[3,3,9]": ["draft.feature_levels=3,3,9:"],
    "draft=peagle objective.steps=3": ["objective.steps=3:", "1 with draft=peagle", "draft.block_size"],
    "draft=block draft.feed=false draft.down_sample_ratio=0.5": ["draft.down_sample_ratio=0.5:", "draft.causal=true"],
    "draft=eagle3 objective.dpace_alpha=0.1": ["objective.dpace_alpha=0.1:", "null with draft=eagle3"],
    "draft=model draft.num_layers=2 draft.train_part=head": ["draft.train_part=head:", "layers"],
    "draft=model draft.num_layers=2 objective.anchors=4": ["objective.anchors=4:", "null with draft=model"],
    "draft=eagle3 draft.path=. draft.draft_vocab_size=100": ["draft.draft_vocab_size=100:"],
    "draft=model draft.num_layers=2 deepspeed.shard_target=true": ["deepspeed.shard_target=true:"],
    "draft=model draft.num_layers=2 draft.train_part=all deepspeed=zero1 launch.ranks=2": ["deepspeed.stage=1:"],
    "target.quantize=nf4 deepspeed.shard_target=true": ["target.quantize=nf4:", "null with deepspeed.shard_target=true"],
    "optim=muon deepspeed=zero3": ["optim.kind=muon:", "deepspeed.stage=3", "zero2"],
    "optim=muon deepspeed=zero2 deepspeed.offload_optimizer=cpu": ["optim.kind=muon:", "offload_optimizer"],
    "deepspeed=zero0 deepspeed.offload_optimizer=cpu": ["deepspeed.offload_optimizer=cpu:"],
    "train.patience=3": ["train.patience=3:"],
    "deepspeed.extra=3": ["deepspeed.extra:", "mapping"],
    "draft/compressor=resampler draft.compressor.ratio=3": ["draft.compressor.ratio", "draft/compressor"],
    "draft.compressor.kind=pool": ["draft.compressor.kind=pool", "draft/compressor=pool"],
    "draft=model draft.num_layers=1 draft/compressor=pool": ["draft/compressor=pool", "none", "draft=model"],
}


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", SWEEP_FILES, ids=lambda path: path.stem)
def test_a_sweep_plugin_that_is_not_installed_is_named(path, in_empty_folder, capsys):
    if importlib.util.find_spec("hydra_plugins") is not None:
        pytest.skip("plugins of Hydra are installed")
    assert exit_code(main, "-m", f"sweep={path.stem}", "seed=1,2", "launch.plan=true") == 2
    check_message(capsys.readouterr().err, "sage-draft[sweep]")


@pytest.mark.parametrize(("overrides", "parts"), WRONG.items(), ids=WRONG.keys())
@pytest.mark.slow
def test_mistakes_are_refused_by_name_with_exit_code_2(overrides, parts, in_empty_folder, capsys):
    # an existing target folder; its content is read only after all of these checks
    assert exit_code(main, f"target.path={in_empty_folder}", *overrides.split()) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1, shown.err
    check_message(shown.err, *parts)
    assert shown.out == ""
    assert list(in_empty_folder.iterdir()) == []


def test_negative_control_a_good_configuration_passes(in_empty_folder: Path) -> None:
    check(compose("config", [f"target.path={in_empty_folder}"], Config))


def config_in(folder: Path, *overrides: str) -> Config:
    return compose("config", [f"target.path={folder}", f"run.dir={folder}/run", *overrides], Config)


def test_an_existing_run_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    check(config_in(tmp_path))  # empty
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with refused("run.dir=", "empty folder", error=ConfigError):
        check(config_in(tmp_path))
    (tmp_path / "run" / "config.yaml").write_text("seed: 0")
    with refused("run.dir=", "run.resume=true", error=ConfigError):
        check(config_in(tmp_path))


@pytest.mark.slow
def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for run in ("file", "file/run", "file/below/run"):
        with refused(f"run.dir={tmp_path}/{run}:", error=ConfigError):
            check(config_in(tmp_path, f"run.dir={tmp_path}/{run}"))
    saved = OmegaConf.to_yaml(OmegaConf.structured(config_in(tmp_path)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(saved)

    def fail(*_: object, **__: object) -> None:  # root may write anywhere, so a read-only folder is simulated
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", fail)
    for overrides in ([f"run.dir={tmp_path}/new/run"], ["run.resume=true"]):
        with refused("run.dir=", "Permission denied", error=ConfigError):
            check(config_in(tmp_path, *overrides))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_a_crash_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(config: Config) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(sys, "argv", ["sage-train"])
    assert App(config_name="config", schema=Config, task=broken, is_main=True).run() == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown and shown.endswith("error: RuntimeError: a bug\n")


def test_debug_shows_where_a_mistake_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, "--debug", "seed=-1", f"target.path={tmp_path}") == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "error: seed=-1" in shown


@pytest.mark.slow
def test_a_failed_job_does_not_end_a_sweep(in_empty_folder, monkeypatch, capsys):
    seen: list[tuple[int, str]] = []

    def task(config: Config) -> int:
        if config.seed == 1:
            raise ConfigError("seed=1: not this one")
        seen.append((config.seed, config.run.dir))
        return 0

    monkeypatch.setattr(sys, "argv", ["sage-train", "-m", "seed=0,1,2", "run.dir=sweep"])
    assert App(config_name="config", schema=Config, task=task, is_main=True).run() == 2
    assert seen == [(0, "sweep/seed_0"), (2, "sweep/seed_2")]
    shown = capsys.readouterr().err
    assert "error: seed=1: not this one" in shown
    assert shown.endswith("error: 1 of 3 jobs failed: seed=1 (exit 2: seed=1: not this one)\n")
    (records,) = (in_empty_folder / "runs" / ".sweep").iterdir()
    assert sorted(path.name for path in records.iterdir()) == [*(f"job_0000{n}.json" for n in range(3)), "multirun.yaml"]
    for content in ('{"number": 3, "name": "seed=3", "host": "other"}', "{"):
        (records / "job_00003.json").write_text(content)
        with refused("job_00003.json"):
            read_jobs(records)


def test_sage_train_without_arguments_says_what_to_choose(capsys: pytest.CaptureFixture[str], in_empty_folder: Path) -> None:
    assert exit_code(main) == 2 and not list(in_empty_folder.iterdir())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all("sage-train" in line for line in lines[1:])

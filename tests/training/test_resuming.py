"""A run is resumed with its own configuration; changes are shown, recorded with their step, or refused, as are changed data."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.messages import refused
from support.train_helpers import command, configured, metrics, train_quickly

from checkpoints import run_folder
from checkpoints.export.exporter import find_source
from checkpoints.inspect import inspect_folder
from train.config.checks import check
from train.config.command_line import expand
from train.config.hydra_app import compose
from train.config.resuming import changes
from train.config.schema import Config, ConfigError
from train.state.resume import TrainState, read_progress

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]
START = ("draft=eagle", "optim.lr=8e-3", "objective.steps=2", "decode.options.sage.max_depth=4", "train.save_every=1")


def started(folder: Path, *overrides: str) -> Path:
    """A run folder with a configuration and nothing else."""
    config = compose("config", [f"target.path={folder}", f"run.dir={folder}/run", *START, *overrides], Config)
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    return folder / "run"


def resumed(run: Path, *overrides: str) -> Config:
    return compose("config", [*expand(["--resume", str(run)]), *overrides], Config)


def test_nothing_but_the_run_is_needed(tmp_path: Path) -> None:
    run = started(tmp_path, "draft=eagle3", "draft.draft_vocab_size=100", "draft/compressor=pool", "tracking=tensorboard")
    config = resumed(run)
    assert (config.optim.lr, config.objective.steps) == (8e-3, 2)
    assert config.decode.options["sage"] == {"max_depth": 4}
    assert (config.draft.kind, config.draft.compressor.kind, config.tracking.kind) == ("eagle3", "pool", "tensorboard")
    assert changes(config) == []
    check(config)


def test_length_launch_tracking_and_decoding_may_change(tmp_path: Path) -> None:
    words = ["train.max_steps=7", "launch.ranks=2", "deepspeed=zero0", "tracking=tensorboard", "decode.num_prompts=3"]
    config = resumed(started(tmp_path), *words, "decode/policy=[autoregressive,chain]", "data.num_workers=1")
    found = {change.key: change for change in changes(config)}
    assert {"train.max_steps", "launch.ranks", "deepspeed.stage", "tracking.kind", "data.num_workers"} < found.keys()
    assert "recipe" not in " ".join(map(str, found.values()))
    check(config)


def test_changes_of_the_recipe_are_told_apart(tmp_path: Path) -> None:
    config = resumed(started(tmp_path), "optim=adamw_cosine", "objective=lk", "train.max_steps=700")
    recipe = {change.key for change in changes(config) if str(change).endswith("(training recipe)")}
    assert {"optim.schedule", "objective.lk_weight"} < recipe and "train.max_steps" not in recipe
    check(config)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        *(("seed=1", "seed=1"), ("draft=eagle3", "draft.kind=eagle3"), ("draft/compressor=pool", "draft.compressor.kind=pool")),
        *(("target=qwen2_5_vl_7b", "target.path="), ("+data/validation=pocket", "data.validation.pocket")),
    ],
)
def test_settings_that_make_another_run_are_refused_by_key(tmp_path: Path, override: str, key: str) -> None:
    with refused(key, "run.dir", error=ConfigError):
        check(resumed(started(tmp_path), override))


def test_a_mistyped_run_is_refused(tmp_path: Path) -> None:
    with refused(f"run.dir={tmp_path}/rum", "config.yaml", error=ConfigError):
        resumed(tmp_path / "rum")
    with refused("--resume", error=ConfigError):
        expand(["--resume"])
    assert expand(["a=1", "--resume=x", "b=2"]) == ["a=1", "run.dir=x", "run.resume=true", "b=2"]


def test_a_configuration_without_newer_keys_is_resumed(tmp_path: Path) -> None:
    run = started(tmp_path)
    saved = OmegaConf.load(run / "config.yaml")
    del saved.data.cache_keep, saved.objective.name
    OmegaConf.save(saved, run / "config.yaml")
    config = resumed(run)
    assert changes(config) == []
    check(config)


def test_a_configuration_of_another_version_is_refused(tmp_path: Path) -> None:
    run = started(tmp_path)
    with (run / "config.yaml").open("a") as file:
        file.write("unheard_of: 1\n")
    with refused("unheard_of", error=ConfigError):
        resumed(run)


def test_recipe_changes_are_recorded_with_their_step(tmp_path: Path, target: Path) -> None:
    run = tmp_path / "run"
    first = command(target, run, "optim.lr=8e-3", "train.max_steps=2")
    assert train_quickly(compose("config", first, Config)) == 0
    assert train_quickly(resumed(run)) == 0 and len(run_folder.config_files(run)) == 1  # nothing has changed
    original = (run / "config.yaml").read_bytes()
    assert train_quickly(resumed(run, "train.max_steps=3")) == 0  # length only
    assert train_quickly(resumed(run, "train.max_steps=4", "optim.lr=1e-3")) == 0

    assert (run / "config.yaml").read_bytes() == original
    assert [(step, path.name) for step, path in run_folder.config_files(run)[1:]] == [
        (2, "config_2_from_step_00000002.yaml"),
        (3, "config_3_from_step_00000003.yaml"),
    ]
    assert run_folder.read_run_config(run, step=3)["optim"]["lr"] == 8e-3
    assert run_folder.read_run_config(run)["optim"]["lr"] == 1e-3
    entries = json.loads((run / "provenance.json").read_text())["resumed"]
    assert [entry["from_step"] for entry in entries] == [2, 2, 3]
    assert entries[2]["changed"]["optim.lr"] == [8e-3, 1e-3]
    assert [line["lr"] for line in metrics(run) if "lr" in line] == [8e-3, 8e-3, 8e-3, 1e-3]

    described = "from step 3: optim.lr 0.008 -> 0.001"
    assert find_source(run / "draft").recipe_changes == [described]
    assert inspect_folder(run).facts["recipe changed"] == [described]
    assert described in (run / "report.md").read_text()


def test_a_run_in_progress_is_refused(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "WAIT_S", 0)
    run = tmp_path / "run"
    assert train_quickly(compose("config", [*command(target, run), "train.max_steps=1"], Config)) == 0
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != run_folder.LOCK}
    with run_folder.locked_run(run), refused("run.dir", "another process"):
        train_quickly(resumed(run, "train.max_steps=2"))
    with refused("already holds a run"):  # which was not there yet when the command started
        train_quickly(compose("config", command(target, run), Config))
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != run_folder.LOCK} == before
    assert train_quickly(resumed(run, "train.max_steps=2")) == 0


def test_changed_data_is_refused_by_name_and_restored_data_accepted(tmp_path: Path, target: Path) -> None:
    def line(number: int) -> str:
        turns = [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": "the red cube"}]
        return json.dumps({"id": str(number), "messages": turns}) + "\n"

    def configure(*overrides: str) -> Config:
        data = ["data=messages", f"data.path={rows}", "data.num_examples=0", "data.holdout=0.1", "data.num_workers=0"]
        return configured(target, tmp_path / "run", *data, *overrides)

    rows, original = tmp_path / "rows.jsonl", "".join(map(line, range(40)))
    rows.write_text(original)
    assert train_quickly(configure()) == 0
    rows.write_text(original + line(40))
    with refused("data.path=", "rows.jsonl", error=ConfigError):
        train_quickly(configure("run.resume=true", "train.max_steps=3"))
    assert not (tmp_path / "run" / "state" / "step_00000003").exists()
    rows.write_text(original)
    assert train_quickly(configure("run.resume=true", "train.max_steps=3")) == 0


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trainer.json"
    file.write_text(json.dumps({**asdict(TrainState(step=2)), "world_size": 1}))
    assert read_progress(file) == (TrainState(step=2), 1)
    for stored, key in (
        ({"step": 2, "world_size": 1, "momentum": 3}, "momentum: unknown"),
        ({"step": 2}, "world_size: missing"),
    ):
        file.write_text(json.dumps(stored))
        with refused("run.resume", str(file), key, "another run.dir"):
            read_progress(file)

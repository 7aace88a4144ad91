"""A run is resumed with its own configuration; changes are shown, recorded with their step, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.messages import refused
from support.train_helpers import command, single_process, train_quickly

from checkpoints import run_folder
from checkpoints.export.source import find_source
from checkpoints.inspect import inspect_folder
from train.config.checks import check
from train.config.hydra_app import compose
from train.config.overrides import with_resume
from train.config.resuming import changes
from train.config.schema import Config, ConfigError

START = ("draft=eagle", "optim.lr=8e-3", "objective.steps=2", "decode.options.sage.max_depth=4", "train.save_every=1")


def started(folder: Path, *overrides: str) -> Path:
    """A run folder with a configuration and nothing else."""
    config = compose("config", [f"target.path={folder}", f"run.dir={folder}/run", *START, *overrides], Config)
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    return folder / "run"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with single_process(monkeypatch):
        yield


def resumed(run: Path, *overrides: str) -> Config:
    config: Config = compose("config", [*with_resume(["--resume", str(run)]), *overrides], Config)
    return config


@pytest.mark.slow
def test_nothing_but_the_run_is_needed(tmp_path: Path) -> None:
    run = started(tmp_path, "draft=eagle3", "draft.draft_vocab_size=100", "draft/compressor=pool", "tracking=tensorboard")
    config = resumed(run)
    assert (config.optim.lr, config.objective.steps) == (8e-3, 2)
    assert config.decode.options["sage"] == {"max_depth": 4}
    assert (config.draft.kind, config.draft.compressor.kind, config.tracking.kind) == ("eagle3", "pool", "tensorboard")
    assert changes(config) == []
    check(config)


@pytest.mark.slow
def test_keys_of_the_own_choices_need_no_choice(tmp_path: Path) -> None:
    config = resumed(started(tmp_path, "tracking=wandb"), "tracking.project=mine")
    assert [change.key for change in changes(config)] == ["tracking.project"]


@pytest.mark.slow
def test_the_complete_command_line_of_the_start_is_accepted_too(tmp_path: Path) -> None:
    run = started(tmp_path, "experiment=debug", "draft=eagle3", "data.num_examples=8")
    words = [f"target.path={tmp_path}", *START, "experiment=debug", "draft=eagle3", "data=pocket", "data.num_examples=8"]
    assert changes(resumed(run, *words)) == []


@pytest.mark.slow
def test_only_resuming_compares_with_the_run(tmp_path: Path) -> None:
    run = started(tmp_path)
    planned = compose("config", [f"target.path={tmp_path}", f"run.dir={run}", "launch.plan=true", "optim.lr=1e-3"], Config)
    assert changes(planned) == []
    saved = OmegaConf.load(run / "config.yaml")
    del saved.optim.grad_clip  # a key without a default, as if it were newer than the run
    OmegaConf.save(saved, run / "config.yaml")
    assert changes(resumed(run, "optim.grad_clip=2")) == []
    assert [str(change) for change in changes(resumed(run, "optim.grad_clip=2", "optim.lr=1e-3"))] == [
        "optim.lr: 0.008 -> 0.001 (training recipe)"
    ]


@pytest.mark.parametrize(
    "override",
    [
        *("train.max_steps=7", "train.micro_batch_size=2", "train.validate_every=3", "launch.ranks=2", "deepspeed=zero0"),
        *("tracking=tensorboard", "decode.num_prompts=3", "decode/policy=[autoregressive,chain]", "data.num_workers=1"),
    ],
)
@pytest.mark.slow
def test_length_launch_tracking_and_decoding_may_change(tmp_path: Path, override: str) -> None:
    config = resumed(started(tmp_path), override)
    assert changes(config) and not any(change.is_fixed or change.is_recipe for change in changes(config))
    check(config)


@pytest.mark.parametrize("override", ["optim.lr=1e-3", "objective.steps=3", "optim=adamw_cosine", "objective=lk"])
@pytest.mark.slow
def test_changes_of_the_recipe_are_told_apart(tmp_path: Path, override: str) -> None:
    config = resumed(started(tmp_path), override)
    assert any(change.is_recipe for change in changes(config))
    check(config)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        *(("seed=1", "seed=1"), ("draft=eagle3", "draft.kind=eagle3"), ("draft/compressor=pool", "draft.compressor.kind=pool")),
        *(("draft.input_norm=false", "draft.input_norm=False"), ("data=sharegpt", "data.name=sharegpt")),
        *(("target=qwen2_5_vl_7b", "target.path="), ("train.global_batch_size=64", "train.global_batch_size=64")),
        *(("+data/validation=pocket", "data.validation.pocket"), ("score.metric=speedup", "score.metric=speedup")),
    ],
)
@pytest.mark.slow
def test_settings_that_make_another_run_are_refused_by_key(tmp_path: Path, override: str, key: str) -> None:
    with refused(key, "run.dir", error=ConfigError):
        check(resumed(started(tmp_path), override))


def test_a_mistyped_run_is_refused(tmp_path: Path) -> None:
    with refused(f"run.dir={tmp_path}/rum", "config.yaml", error=ConfigError):
        resumed(tmp_path / "rum")
    with refused("--resume", error=ConfigError):
        with_resume(["--resume"])
    assert with_resume(["a=1", "--resume=x", "b=2"]) == ["a=1", "run.dir=x", "run.resume=true", "b=2"]


@pytest.mark.slow
def test_a_configuration_without_newer_keys_is_resumed(tmp_path: Path) -> None:
    run = started(tmp_path)
    saved = OmegaConf.load(run / "config.yaml")
    del saved.data.cache_keep, saved.objective.name
    OmegaConf.save(saved, run / "config.yaml")
    config = resumed(run)
    assert changes(config) == []
    check(config)


@pytest.mark.slow
def test_a_configuration_of_another_version_is_refused(tmp_path: Path) -> None:
    run = started(tmp_path)
    with (run / "config.yaml").open("a") as file:
        file.write("unheard_of: 1\n")
    with refused("unheard_of", error=ConfigError):
        resumed(run)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_recipe_changes_are_recorded_with_their_step(tmp_path: Path, target: Path) -> None:
    run = tmp_path / "run"
    first = command(target, run, "optim.lr=8e-3", "train.max_steps=2")
    assert train_quickly(compose("config", first, Config)) == 0
    original = (run / "config.yaml").read_bytes()
    assert train_quickly(resumed(run, "train.max_steps=3")) == 0  # length only
    assert train_quickly(resumed(run, "train.max_steps=4", "optim.lr=1e-3")) == 0

    assert (run / "config.yaml").read_bytes() == original
    assert [(step, path.name) for step, path in run_folder.config_files(run)[1:]] == [
        (2, "config_2_from_step_00000002.yaml"),
        (3, "config_3_from_step_00000003.yaml"),
    ]
    assert run_folder.recipe_changes(run) == [(3, {"optim.lr": (8e-3, 1e-3)})]
    assert run_folder.read_run_config(run, step=3)["optim"]["lr"] == 8e-3
    assert run_folder.read_run_config(run)["optim"]["lr"] == 1e-3
    entries = json.loads((run / "provenance.json").read_text())["resumed"]
    assert [entry["from_step"] for entry in entries] == [2, 3]
    assert entries[1]["changed"]["optim.lr"] == [8e-3, 1e-3]
    losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["lr"] for line in losses if "lr" in line] == [8e-3, 8e-3, 8e-3, 1e-3]

    described = "from step 3: optim.lr 0.008 -> 0.001"
    assert find_source(run / "draft").recipe_changes == [described]
    assert inspect_folder(run).facts["recipe changed"] == [described]
    assert described in (run / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
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


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_resume_without_changes_leaves_the_configuration_alone(tmp_path: Path, target: Path) -> None:
    run = tmp_path / "run"
    assert train_quickly(compose("config", command(target, run, "train.max_steps=1"), Config)) == 0
    assert train_quickly(resumed(run)) == 0
    assert len(run_folder.config_files(run)) == 1

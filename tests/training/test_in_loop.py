"""Validation in training: prompts per rank, merged measurements, the best draft, early stopping."""

import json
import logging
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.messages import refused
from support.train_helpers import VALIDATE, configured, draft_weights, quick_report, train_quickly

from checkpoints.run_folder import read_reports
from checkpoints.store import StateStore
from data_prep.conversation import FOLLOW_UPS, Conversation
from sage.bench.measurement import BenchPrompt, Interrupted, Measurement, Planned
from sage.decoding.settings import Sampling
from train.config.hydra_app import compose
from train.config.schema import Config, ValidateOn
from train.job.loop import TrainingError
from train.launch.launcher import launch
from train.launch.ranks import Ranks
from train.launch.supervisor import RankFailed, StopFlag
from train.state.resume import TrainState
from train.validation.in_loop import InLoopValidation, ValidationOutcome, all_ranks_decode, interleave, shard_prompts
from train.validation.prompts import PromptSet, limit_turns
from train.validation.validate import validate

pytestmark = pytest.mark.usefixtures("alone")


def conversation(name: str, later: int) -> Conversation:
    return Conversation(id=name, messages=[], meta={FOLLOW_UPS: [f"question {n}" for n in range(later)]} if later else {})


def turns(prompts: list[Any]) -> list[tuple[str, int]]:
    return [(prompt.id, 1 + len(prompt.meta.get(FOLLOW_UPS, []))) for prompt in prompts]


def test_the_turns_of_all_conversations_are_limited() -> None:
    prompts = [conversation("a", 1), conversation("b", 3), conversation("c", 0)]
    assert turns(limit_turns(prompts, 99)) == [("a", 2), ("b", 4), ("c", 1)]
    assert turns(limit_turns(prompts, 4)) == [("a", 2), ("b", 2)]
    assert turns(limit_turns(prompts, 1)) == [("a", 1)]
    assert turns(prompts) == [("a", 2), ("b", 4), ("c", 1)]  # not modified


def measurement(names: list[str]) -> Measurement:
    """The runs are strings, which merging does not read."""
    runs: Any = {runner: [[f"{runner} on {name}"] for name in names] for runner in ("ar", "sage")}
    prompts = [BenchPrompt(name=name, inputs={}) for name in names]
    return Measurement(prompts=prompts, sampling=Sampling(), repeats=1, runs=runs, autoregressive=["ar"])


def test_a_baseline_that_failed_on_one_rank_is_dropped() -> None:
    parts = [measurement(["p0"]), replace(measurement(["p1"]), failed={"ar": "no memory"})]
    merged = interleave(parts)
    assert set(merged.runs) == {"sage"} and merged.autoregressive == [] and merged.failed == {"ar": "no memory"}


def test_ranks_that_decode() -> None:
    config = compose("config", [], Config)
    for where, device, ranks, expected in (
        *(("auto", "cpu", 4, False), ("auto", "cuda", 4, True), ("auto", "cuda", 1, False)),
        *(("all", "cpu", 2, True), ("main", "cuda", 2, False)),
    ):
        config.train.validate_on = ValidateOn(where)
        assert all_ranks_decode(config, Ranks(0, ranks, torch.device(device))) is expected
    config.deepspeed.shard_target, config.train.validate_on = True, ValidateOn.auto
    assert not all_ranks_decode(config, Ranks(0, 4, torch.device("cuda")))  # every pass takes all ranks


class Scores:
    """Replaces decoding: each validation has the next of these speedups or raises it; keeps the prompts of each."""

    def __init__(self, *left: float | Exception) -> None:
        self.left, self.prompts = list(left), list[object]()

    def __call__(self, *arguments: object, **_: object) -> dict[str, Any]:
        self.prompts.append(arguments[3])
        if isinstance(found := self.left.pop(0), Exception):
            raise found
        return quick_report(speedup=found)


@pytest.fixture
def configure(target: Path, tmp_path: Path) -> Callable[..., Config]:
    return lambda *overrides: configured(target, tmp_path / "run", *overrides)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch.profiler")
def test_a_run_without_progress_ends_early_and_keeps_its_best_draft(configure: Callable[..., Config], tmp_path: Path) -> None:
    """The best score is at step 2; with a patience of two the run ends at step 4 of 9. Steps 2 and 3 are traced."""
    scores = Scores(1.0, 2.0, 1.5, 2.0, 9.9)
    length = ["train.max_steps=9", "train.validate_every=1", "train.patience=2"]
    assert train_quickly(configure(*length, "score.metric=speedup", "train.profile=[2,3]"), scores) == 0
    run = tmp_path / "run"
    assert scores.left == [9.9]
    assert len(scores.prompts) == 4 and all(prompts is scores.prompts[0] for prompts in scores.prompts)  # prepared once
    trainer = json.loads((run / "state" / "step_00000004" / "trainer.json").read_text())
    assert (trainer["step"], trainer["best"], trainer["best_step"], trainer["stale"]) == (4, 2.0, 2, 2)
    last, best = draft_weights(run), load_file(run / "draft_best" / "model.safetensors")
    assert any(not torch.equal(last[name], best[name]) for name in last)
    trace = json.loads((run / "profile" / "rank_00000.json").read_text())
    steps = [event for event in trace["traceEvents"] if event.get("name") == "Optimizer.step#AdamW.step"]
    assert len(steps) == 2
    assert (run / "report.md").read_text().startswith("# Run `run`")


@pytest.mark.slow
def test_a_validation_that_fails_ends_the_run_only_if_it_is_the_last_one(configure, tmp_path, caplog):
    """Steps 1 to 3: out of memory, a score, out of memory; the last one is repeated at the end, and when the run is resumed."""
    full = torch.OutOfMemoryError("CUDA out of memory.")
    config = configure("train.max_steps=3", "train.validate_every=1")
    with refused(f"{tmp_path / 'run'}: step 3 is saved", "rank 0: OutOfMemoryError: CUDA out of memory", error=TrainingError):
        train_quickly(config, Scores(full, 1.0, full, full))
    assert "step 1: validation failed (rank 0: OutOfMemoryError" in caplog.text
    trainer = json.loads((tmp_path / "run" / "state" / "step_00000003" / "trainer.json").read_text())
    assert (trainer["best_step"], trainer["validated_step"]) == (2, 2)
    config.run.resume = True
    assert train_quickly(config, Scores(2.0)) == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_waits_for_one_whose_validation_failed(rank: int, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[Any]()
    monkeypatch.setattr(Ranks, "gather", lambda _, item: [item])
    monkeypatch.setattr(Ranks, "gather_on_main", lambda _, item: sent.append(item) or [None, (None, False)])
    monkeypatch.setattr("train.validation.in_loop.InLoopValidation._save_draft", lambda _: target)
    monkeypatch.setattr("sage.load_draft", lambda *_: None)
    config = compose("config", ["train.validate_on=all"], Config)
    ranks = Ranks(rank, 2, torch.device("cpu"))
    shard = shard_prompts(config, ranks, PromptSet(None, config.decode, [conversation(name, 0) for name in "ab"]))
    parts: Any = dict.fromkeys(("engine", "target", "sharded", "tracker", "stop", "disk"))
    monkeypatch.setattr(VALIDATE, Scores(OSError("no")))
    validation = InLoopValidation(config=config, ranks=ranks, shard=shard, state=TrainState(), policies={}, **parts)
    assert validation() == ValidationOutcome(failure=f"rank {rank}: OSError: no")
    assert sent == [None if rank == 0 else (None, True)]  # the merge, marked as incomplete


@pytest.mark.slow
def test_an_interrupted_validation_keeps_what_was_measured_and_counts_for_nothing(configure, tmp_path, caplog, capsys):
    """A signal after the first of two prompts; the resumed run replaces the partial report by a complete one. The run ends by
    its minutes, of which those before a restart count, with a validated draft.
    """
    is_signalled = [True]

    def decode(*arguments: Any, progress: Any, **options: Any) -> Any:
        def after_prompt(*now: Any) -> None:
            seen.append(now)
            if now[0] == 1 and is_signalled and is_signalled.pop():
                signal.raise_signal(signal.SIGTERM)
            progress(*now)

        return validate(*arguments, progress=after_prompt, **options)

    seen = list[tuple[int, int, str]]()
    length = ["train.max_steps=null", "train.max_minutes=1e-6"]
    overrides = [*length, "decode.num_prompts=2", "decode.policies=[autoregressive,chain]"]
    config, run = configure(*overrides), tmp_path / "run"
    with caplog.at_level(logging.INFO, logger="train"):
        assert train_quickly(config, decode) == 3
    partial = run / "validation" / "step_00000001_partial"
    assert f"{partial}: partial: interrupted after 1 of 2 prompts" in caplog.text
    report = json.loads((partial / "report.json").read_text())
    assert (report["prompts"], report["partial"]["planned_prompts"]) == (1, 2) and read_reports(run) == []
    assert "**Partial: interrupted after 1 of 2 prompts.**" in (partial / "report.md").read_text()
    assert [now[:2] for now in seen] == [(0, 2), (1, 2)]
    assert re.fullmatch(r"chain \d\.\d\d tokens/pass \d+\.\d\dx", seen[1][2])
    resumed = [*overrides, "run.resume=true"]
    assert train_quickly(configured(Path(config.target.path), run, *resumed), decode) == 0
    assert not partial.exists() and read_reports(run)[0][1]["prompts"] == 2
    state = json.loads((run / "state" / "step_00000001" / "trainer.json").read_text())
    assert state["time_s"] > 6e-5 and state["validated_step"] == 1 and not (run / "state" / "step_00000002").exists()
    capsys.readouterr()
    assert not train_quickly(configured(Path(config.target.path), run, *resumed), Scores()), "decoded again"
    shown = capsys.readouterr().out
    assert shown.startswith(f"{run}: already finished at step 1; train.max_steps=N")
    assert "\nverdict: " in shown and "\n* **verdict:** " in (run / "report.md").read_text()


def test_measurements_are_merged_without_sending_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 prepares the prompts of the others itself; the answers to their follow-up questions arrive with them. The ranks
    run one after the other, rank 0 last.
    """
    sent, names, measured = list[Any](), ["a", "b", "c"], []

    def gather_on_main(_: Ranks, item: Any) -> list[Any]:
        sent.append(item)
        return [] if len(sent) == 1 else [None, sent[0]]

    monkeypatch.setattr(Ranks, "gather_on_main", gather_on_main)
    target = SimpleNamespace(prepare=lambda messages: {"input_ids": len(messages)})
    config = compose("config", ["train.validate_on=all", "decode.num_prompts=9"], Config)
    monkeypatch.setattr(PromptSet, "_answer", lambda _, messages: f"answer {len(messages)}")
    for rank in (1, 0):
        prompts = PromptSet(target, config.decode, [conversation(name, int(name == "b")) for name in names])
        if rank == 0:
            prompts.prepare_first_turns()
        shard = shard_prompts(config, Ranks(rank, 2, torch.device("cpu")), prompts)
        own = measurement([turn.name for turn in shard.prompts.turns])
        measured.append(shard.merge(replace(own, prompts=shard.prompts.turns)))
    (without_inputs, later_turns), was_interrupted = sent[0]
    assert not was_interrupted
    assert [prompt.inputs for prompt in without_inputs.prompts] == [{}, {}]
    assert [turn if turn is None else turn.id for turn in later_turns] == [None, "b-turn-2"]
    part = replace(own, prompts=own.prompts[:1], runs={"ar": own.runs["ar"][:1]}, planned=Planned(prompts=3, repeats=1))
    merged = shard.merge(part)
    assert merged is not None and merged.planned == Planned(prompts=4, repeats=1)  # rank 1 completed its two prompts
    assert [prompt.name for prompt in merged.prompts] == ["a", "b", "b-turn-2"]
    monkeypatch.setattr(Ranks, "gather_on_main", lambda *_: [None, (None, False)])
    with pytest.raises(Interrupted):
        shard.merge(None, is_interrupted=True)
    assert sent[1] is None and measured[0] is None and measured[1] is not None
    assert [(prompt.name, prompt.inputs) for prompt in measured[1].prompts] == [
        *(("a", {"input_ids": 0}), ("b", {"input_ids": 0}), ("c", {"input_ids": 0}), ("b-turn-2", {"input_ids": 2}))
    ]


@pytest.mark.slow
def test_two_interrupts_during_the_last_validation_lose_nothing(target: Path, tmp_path: Path) -> None:
    """The state is saved before the validation, and again with its result in the resumed run."""
    run, saved, signals = tmp_path / "run", list[list[int]](), [signal.SIGINT, signal.SIGINT]

    def decode(*_: Any, progress: Any, **__: Any) -> dict[str, Any]:
        saved.append(StateStore(run / "state").steps())
        while signals:
            signal.raise_signal(signals.pop())
        progress(2, 2, "")
        return quick_report(tokens_per_target_pass=2.0)

    def best() -> Any:
        return json.loads((run / "state" / "step_00000002" / "trainer.json").read_text())["best"]

    with refused("run.resume=true", error=RankFailed) as caught:
        launch(configured(target, run, "train.save_every=0"), lambda config: train_quickly(config, decode))
    assert caught.value.exit_code == 3 and saved == [[2]] and best() is None
    assert train_quickly(configured(target, run, "train.save_every=0", "run.resume=true"), decode) == 0
    assert saved == [[2]] * 2 and best() == 2.0


def test_a_rank_that_aborts_tells_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    config, sent = compose("config", ["train.validate_on=all"], Config), list[object]()
    monkeypatch.setattr(Ranks, "gather_on_main", lambda _, item: sent.append(item) or [])
    prompts = [conversation(name, 0) for name in "abc"]
    shard = shard_prompts(config, Ranks(1, 2, torch.device("cpu")), PromptSet(None, config.decode, prompts))
    stop = StopFlag()
    shard.check_stop(stop, 1, 2)
    assert shard.prompts.prompts == prompts[1:2] and shard.num_turns == 3 and shard.merge(None) is None
    stop.is_set = True
    shard.check_stop(stop, 2, 2)  # all prompts are done: too late
    with pytest.raises(Interrupted):
        shard.check_stop(stop, 1, 2)
    assert shard.merge(None, is_interrupted=True) is None
    assert sent == [(None, False), (None, True)]

"""Validation in the loop: who decodes what, how measurements become one, the best draft, when a run ends early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.train_helpers import command, make_target

from checkpoints.store import SaveFailed
from data_prep.conversation import Conversation
from data_prep.multi_turn import LATER
from sage.bench.measurement import BenchPrompt, Measurement
from sage.sampling import Sampling
from train.config.hydra_app import compose
from train.config.schema import Config, ValidateOn
from train.launch.launcher import run_rank
from train.launch.ranks import Ranks
from train.validation.in_loop import all_ranks_decode, first_turns, interleave


def conversation(name: str, later: int) -> Conversation:
    return Conversation(id=name, messages=[], meta={LATER: [f"question {n}" for n in range(later)]} if later else {})


def turns(prompts: list[Any]) -> list[tuple[str, int]]:
    return [(prompt.id, 1 + len(prompt.meta.get(LATER, []))) for prompt in prompts]


def test_ranks_share_conversations_and_ask_no_more_turns_than_one_rank() -> None:
    prompts = [conversation("a", 1), conversation("b", 3), conversation("c", 0)]
    assert turns(first_turns(prompts, 99)) == [("a", 2), ("b", 4), ("c", 1)]
    assert turns(first_turns(prompts, 4)) == [("a", 2), ("b", 2)]
    assert turns(first_turns(prompts, 1)) == [("a", 1)]
    assert first_turns([{"input_ids": 1}, {"input_ids": 2}], 1) == [{"input_ids": 1}]
    assert turns(prompts) == [("a", 2), ("b", 4), ("c", 1)]  # the caller's are as they were


def measurement(names: list[str], failed: dict[str, str] | None = None) -> Measurement:
    """Runs are stand-ins: merging does not look into them."""
    runs: Any = {runner: [[f"{runner} on {name}"] for name in names] for runner in ("ar", "sage")}
    return Measurement(
        prompts=[BenchPrompt(name=name, inputs={}) for name in names],
        sampling=Sampling(max_new_tokens=4),
        repeats=1,
        runs=runs,
        autoregressive=["ar"],
        failed=failed or {},
    )


def test_measurements_of_ranks_are_one_in_the_order_of_the_prompts() -> None:
    names = ["p0", "p1", "p2", "p3", "p4"]
    whole = measurement(names)
    assert interleave([measurement(names[rank::2]) for rank in range(2)]) == whole
    assert interleave([measurement(names[rank::4]) for rank in range(4)]) == whole
    assert interleave([whole]) == whole


def test_a_baseline_that_failed_on_one_rank_is_left_out() -> None:
    parts = [measurement(["p0"]), measurement(["p1"], failed={"ar": "no memory"})]
    merged = interleave(parts)
    assert set(merged.runs) == {"sage"} and merged.autoregressive == [] and merged.failed == {"ar": "no memory"}


@pytest.mark.parametrize(
    ("where", "device", "ranks", "expected"),
    [
        ("auto", "cpu", 4, False),
        ("auto", "cuda", 4, True),
        ("auto", "cuda", 1, False),
        ("all", "cpu", 2, True),
        ("main", "cuda", 2, False),
    ],
)
def test_who_decodes(where: str, device: str, ranks: int, expected: bool) -> None:
    config: Config = compose("config", [f"train.validate_on={where}"], Config)
    assert all_ranks_decode(config, Ranks(0, ranks, torch.device(device))) is expected
    config.deepspeed.shard_target, config.train.validate_on = True, ValidateOn.auto
    assert not all_ranks_decode(config, Ranks(0, ranks, torch.device(device)))  # every pass takes all ranks


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stands in for the decoder: each validation takes the next of these scores."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    left: list[float] = []

    def judged(*_: object, **__: object) -> dict[str, Any]:
        return {"policies": {"sage": {"tokens_per_target_pass": 1.0, "speedup": left.pop(0)}}}

    monkeypatch.setattr("train.validation.in_loop.validate", judged)
    monkeypatch.setattr("train.launch.launcher._summary", lambda *_: None)
    return left


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch.profiler")
def test_a_run_without_progress_ends_early_and_keeps_its_best_draft(scores: list[float], tmp_path: Path) -> None:
    """Best at step 2; with a patience of two it ends at step 4 of 9. Steps 2 and 3 are traced on the way."""
    scores += [1.0, 2.0, 1.5, 2.0, 9.9]
    words = ["train.max_steps=9", "train.validate_every=1", "train.patience=2", "score.metric=speedup", "train.profile=[2,3]"]
    config: Config = compose(
        "config", [*command(make_target(tmp_path), tmp_path / "run", *words), "deepspeed=zero0", "launch.device=cpu"], Config
    )
    assert run_rank(config) == 0
    run = tmp_path / "run"
    assert scores == [9.9]
    trainer = json.loads((run / "state" / "step_00000004" / "trainer.json").read_text())
    assert (trainer["step"], trainer["best"], trainer["best_step"], trainer["stale"]) == (4, 2.0, 2, 2)
    last, best = (load_file(run / name / "model.safetensors") for name in ("draft", "draft_best"))
    assert any(not torch.equal(last[name], best[name]) for name in last)
    trace = json.loads((run / "profile" / "rank_00000.json").read_text())
    steps = [event for event in trace["traceEvents"] if event.get("name") == "Optimizer.step#AdamW.step"]
    assert len(steps) == 2
    assert (run / "report.md").read_text().startswith("# Run `run`")


@pytest.mark.slow
def test_a_page_that_cannot_be_written_ends_the_run_in_one_line(
    scores: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    scores += [1.0]
    monkeypatch.setattr("train.validation.in_loop.write_run_report", full)
    words = [*command(make_target(tmp_path), tmp_path / "run", "train.max_steps=1"), "deepspeed=zero0", "launch.device=cpu"]
    with pytest.raises(SaveFailed, match=r"/run: could not be saved .*No space left.*; make room .*run\.resume=true"):
        run_rank(compose("config", words, Config))

"""Sentences about a measurement: said where the figures are bad, silent where they are good or say nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from train.report.run_page import write_run_report
from train.report.warnings import falls_short, is_hardly_accepted


def report(**tokens_per_pass: float) -> dict[str, Any]:
    part = {"speedup": 1.0, "match": 2, "total": 2}
    return {"policies": {name: part | {"tokens_per_target_pass": value} for name, value in tokens_per_pass.items()}}


def test_a_draft_that_is_hardly_accepted_is_told() -> None:
    said = is_hardly_accepted(report(autoregressive=1.0, chain=1.02, sage=1.04))
    assert said is not None and said.startswith("hardly a drafted token is accepted: 1.04 tokens per target pass at best; ")


@pytest.mark.parametrize("figures", [{"chain": 1.02, "sage": 1.5}, {"autoregressive": 1.0}])
def test_silent_where_one_policy_gets_there_or_none_drafts(figures: dict[str, float]) -> None:
    assert is_hardly_accepted(report(**figures)) is None


@pytest.mark.parametrize(
    ("chain", "estimate", "is_told"), [(1.1, 3.0, True), (1.9, 3.0, False), (None, 3.0, False), (1.0, None, False)]
)
def test_a_measurement_far_below_the_estimate_is_told(chain: float | None, estimate: float | None, is_told: bool) -> None:
    said = falls_short(40, chain, estimate)
    assert (said is not None) is is_told
    if said is not None:
        assert said.startswith("step 40: the training batches promise 3.00 tokens per target pass, the decoder measured 1.10")


@pytest.mark.parametrize(("chain", "is_told"), [(1.2, True), (2.9, False)])
def test_the_run_report_says_it_too(tmp_path: Path, caplog: pytest.LogCaptureFixture, chain: float, is_told: bool) -> None:
    (tmp_path / "config.yaml").write_text(
        "score: {metric: tokens_per_target_pass, policy: null}\ndecode: {policies: [chain]}\n"
    )
    line = {"step": 40, "tokens": 9, "loss": 1.0, "time_s": 1.0, "estimated_tokens_per_pass": 3.0}
    line |= {"agreement": 0.5, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    folder = tmp_path / "validation" / "step_00000040"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(report(chain=chain)))
    with caplog.at_level(logging.WARNING):
        page = write_run_report(tmp_path).read_text()
    assert ("the training batches promise 3.00" in page) is is_told
    assert ("the training batches promise 3.00" in caplog.text) is is_told

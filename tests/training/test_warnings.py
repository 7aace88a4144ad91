"""Warnings about a measured draft: present for bad figures, absent for good or missing ones."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.messages import check_message

from train.report.run_page import write_run_report
from train.report.warnings import below_estimate_warning, low_acceptance_warning


def report(**tokens_per_pass: float) -> dict[str, Any]:
    part = {"speedup": 1.0, "match": 2, "total": 2}
    return {"policies": {name: part | {"tokens_per_target_pass": value} for name, value in tokens_per_pass.items()}}


def test_an_acceptance_rate_near_zero_is_reported() -> None:
    warning = low_acceptance_warning(report(autoregressive=1.0, chain=1.02, sage=1.04))
    assert warning is not None
    check_message(warning, "acceptance rate", "1.04", "docs/troubleshooting.md")


@pytest.mark.parametrize("figures", [{"chain": 1.02, "sage": 1.5}, {"autoregressive": 1.0}])
def test_no_warning_if_one_policy_is_accepted_or_none_drafts(figures: dict[str, float]) -> None:
    assert low_acceptance_warning(report(**figures)) is None


@pytest.mark.parametrize(
    ("chain", "estimate", "is_reported"), [(1.1, 3.0, True), (1.9, 3.0, False), (None, 3.0, False), (1.0, None, False)]
)
def test_a_measurement_far_below_the_estimate_is_reported(
    chain: float | None, estimate: float | None, is_reported: bool
) -> None:
    warning = below_estimate_warning(40, chain, estimate)
    assert (warning is not None) is is_reported
    if warning is not None:
        check_message(warning, "step 40", "3.00", "1.10", "docs/troubleshooting.md")


@pytest.mark.parametrize(("chain", "is_reported"), [(1.2, True), (2.9, False)])
def test_the_warning_is_logged_and_on_the_page_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, chain: float, is_reported: bool
) -> None:
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
    warning = below_estimate_warning(40, chain, 3.0)
    assert (warning is not None) is is_reported
    assert (str(warning) in page) is is_reported
    assert (str(warning) in caplog.text) is is_reported

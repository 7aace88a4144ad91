"""What the plots show, read before they are rendered: order, legends, labels, intervals, one definition of every figure."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure

from sage.bench.report_table import format_table
from sage.runtime.timing import PHASES
from train.report.compare_table import draw_comparison
from train.report.page import MIN_ROUNDS, PLOTS

PHASE_S = dict.fromkeys(PHASES, 0.0) | {"vision": 5.0, "verify": 2.0, "draft_steps": 1.0, "policy": 0.5}
LEVELS = [{"depth": 1, "tried": 100, "kept": 80}, {"depth": 2, "tried": MIN_ROUNDS - 1, "kept": 3}]


def policy(speedup: float, tokens: float = 2.0) -> dict[str, Any]:
    """Figures of report.json. The time of the prompts' median runs does not add up to the one of `tokens_per_s`."""
    speeds = {"speedup": speedup, "speedup_end_to_end": 1.0, "speedup_ci": [speedup - 0.1, speedup + 0.1]}
    counts = {"tokens_per_target_pass": tokens, "mean_accepted_draft": tokens - 1, "match": 1, "total": 1}
    rounds = {"nodes_per_round": 5.0, "draft_steps_per_round": 5.0, "acceptance_by_depth": LEVELS}
    return {**speeds, **counts, **rounds, "tokens_per_s": 250.0, "time_s": PHASE_S}


REPORT = {
    "target": "pocket",
    "fastest_baseline": "autoregressive",
    "policies": {"autoregressive": policy(1.0, 1.0) | {"acceptance_by_depth": []}, "chain": policy(1.9), "static": policy(1.9)},
    "baselines": {},
    "failed_baselines": {},
}


def drawn(file: str) -> Figure:
    made = next(plot for plot in PLOTS if plot.file == file).draw(REPORT)
    assert made is not None
    return made


def test_the_time_per_token_is_that_of_the_table() -> None:
    """Bars and their numbers are 1 / `tokens_per_s`, with the shares of the decoding phases: 2, 1 and 0.5 s of 3.5 s."""
    (axes,) = drawn("time.png").axes
    assert [text.get_text().strip() for text in axes.texts] == ["4.00 ms"] * 3
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(3 * 4.0)
    assert min(bar.get_width() for bar in axes.patches) == pytest.approx(4.0 * 0.5 / 3.5)
    assert " 4.000 " in format_table(REPORT)


def test_acceptance_leaves_out_positions_of_few_rounds_and_draws_equal_points_side_by_side() -> None:
    (axes,) = drawn("acceptance.png").axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[0.8]] * 2
    assert len({float(line.get_xdata()[0]) for line in axes.lines}) == 2


def test_a_comparison_shows_every_policy_with_its_interval() -> None:
    run = {"run": "a", "changed": {}, "policies": REPORT["policies"]}
    made = draw_comparison({"runs": [run], "changed": []})
    assert made is not None
    _, speedups = made.axes
    chain, static = (dots.get_offsets()[0].tolist() for dots in speedups.collections)
    assert chain[0] == static[0] and chain[1] != static[1]
    assert [list(line.get_xdata()) for line in speedups.lines[:2]] == [pytest.approx([1.8, 2.0])] * 2

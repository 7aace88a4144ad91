"""Acceptance by training epoch. Ref: SpecVLM, arXiv 2509.11815."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from matplotlib.figure import Figure

from benchmarks.papers import runs
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab, select
from benchmarks.papers.plots import COLORS, Curve, plot_curves
from benchmarks.papers.study import Expectation, Study
from checkpoints.run_folder import METRICS, read_metrics, read_reports
from train.report.run_page import measured_against_estimate

STORED = ("tokens_per_target_pass", "mean_accepted_draft", "speedup", "match", "total", "rounds")
POLICY = "static"  # the same tree in every round, so that only the draft changes between epochs


def _measure(lab: Lab) -> None:
    """Measures `epochs`: the figures of each validation of the runs."""
    sizes = lab.sizes["epochs"]
    lab.figures(
        "epochs", "epochs", lambda: {"runs": {name: _run(lab, name) for name in sizes["runs"]}}, sizes["runs"], epochs=sizes
    )


def _run(lab: Lab, name: str) -> Json:
    folder = lab.run(name)
    lines, reports = read_metrics(folder / METRICS), read_reports(folder)
    points = [
        {
            **select(row, ("step", "estimate")),
            "epoch": epoch,
            "policies": {policy: select(part, STORED) for policy, part in row["policies"].items()},
        }
        for epoch, row in enumerate(measured_against_estimate(lines, reports), start=1)
    ]
    return {
        "command": runs.command_line(lab.settings, name),
        "target": lab.settings.training.runs[name].target,
        "prompts": reports[-1][1]["prompts"],
        "training_s": lines[-1]["time_s"],
        "tokens": lines[-1]["tokens"],
        "points": points,
    }


def _curve(run: Json) -> tuple[str, list[float]]:
    """Returns a policy, `POLICY` if measured, and its tokens per target pass after each epoch."""
    measured = run["points"][0]["policies"]
    policy = POLICY if POLICY in measured else next(iter(measured))
    return policy, [point["policies"][policy]["tokens_per_target_pass"] for point in run["points"]]


def _expectations(found: Json) -> Iterator[Expectation]:
    for name, run in found["runs"].items():
        policy, tokens = _curve(run)
        smallest = min((after - before for before, after in pairwise(tokens)), default=1.0)
        evidence = f"`{policy}`: {', '.join(f'{value:.2f}' for value in tokens)} tokens per pass"
        if smallest <= 0:
            evidence += f"; smallest change between epochs {smallest:+.2f}, on {run['prompts']} prompts"
        yield Expectation(f"SpecVLM: acceptance increases with every epoch, `{name}`", smallest > 0, evidence)


def _draw(found: Json) -> Figure:
    curves = [
        Curve(name, [point["epoch"] for point in run["points"]], _curve(run)[1], color)
        for color, (name, run) in zip(COLORS, found["runs"].items(), strict=False)
    ]
    subtitle = "tokens per target pass of the static tree on held-out prompts"
    figure = plot_curves("Acceptance by training epoch", subtitle, {"": curves}, "epoch", from_zero=False)
    for one in curves:
        figure.axes[0].text(one.x[-1], one.y[-1], f"  {one.y[-1]:.2f}", va="center", fontsize=9, color=one.color)
    return figure


STUDY = Study(name="epochs", measure=_measure, expectations=_expectations, plots={"epochs.png": _draw})

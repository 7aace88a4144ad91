"""Acceptance by training epoch. Ref: SpecVLM, arXiv 2509.11815."""

from __future__ import annotations

from typing import Any

from benchmarks.papers import runs
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from checkpoints.run_folder import METRICS, read_metrics, read_reports
from train.report.run_page import measured_against_estimate

FIGURES = ("tokens_per_target_pass", "mean_accepted_draft", "speedup", "match", "total", "rounds")


def measure(lab: Lab) -> None:
    """Measures `epochs`: the figures of each validation of the runs."""
    names = lab.settings.epochs.runs
    inputs = lab.run_inputs(*names, epochs=lab.settings.epochs)
    lab.figures("epochs", "epochs", inputs, lambda: {"runs": {name: _curve(lab, name) for name in names}})


def _curve(lab: Lab, name: str) -> Json:
    folder = lab.run(name)
    lines = read_metrics(folder / METRICS)
    reports = read_reports(folder)
    measured = measured_against_estimate(lines, reports)
    return {
        "command": runs.command_line(lab.settings, name),
        "target": lab.settings.training.runs[name].target,
        "prompts": reports[-1][1]["prompts"],
        "training_s": lines[-1]["time_s"],
        "tokens": lines[-1]["tokens"],
        "points": [_point(row, epoch) for epoch, row in enumerate(measured, start=1)],
    }


def _point(row: dict[str, Any], epoch: int) -> Json:
    policies = {name: {key: part[key] for key in FIGURES} for name, part in row["policies"].items()}
    return {"epoch": epoch, "step": row["step"], "estimate": row["estimate"], "policies": policies}

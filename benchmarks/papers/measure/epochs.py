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
    study = lab.settings.epochs
    lab.figures(
        "epochs", "epochs", lambda: {"runs": {name: _curve(lab, name) for name in study.runs}}, study.runs, epochs=study
    )


def _curve(lab: Lab, name: str) -> Json:
    folder = lab.run(name)
    lines, reports = read_metrics(folder / METRICS), read_reports(folder)
    rows = enumerate(measured_against_estimate(lines, reports), start=1)
    return {
        "command": runs.command_line(lab.settings, name),
        "target": lab.settings.training.runs[name].target,
        "prompts": reports[-1][1]["prompts"],
        "training_s": lines[-1]["time_s"],
        "tokens": lines[-1]["tokens"],
        "points": [_point(row, epoch) for epoch, row in rows],
    }


def _point(row: dict[str, Any], epoch: int) -> Json:
    policies = {name: {key: part[key] for key in FIGURES} for name, part in row["policies"].items()}
    return {"epoch": epoch, "step": row["step"], "estimate": row["estimate"], "policies": policies}

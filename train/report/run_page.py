"""The pages and `curves.png` of a run: training curves, and the estimated beside the measured tokens per target pass.

Everything is read from the run folder; `sage-report RUN` draws it again.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints import run_folder
from checkpoints.run_folder import METRICS, read_metrics, read_reports
from data_prep.config import DROPPED
from data_prep.own_answers import OWN_ANSWERS, listed_shares
from sage.bench.report_table import measured_with
from sage.io.files import write_text
from sage.io.tables import markdown_table
from sage.trees import AUTOREGRESSIVE, CHAIN
from train.config.schema import ConfigError
from train.report import style
from train.report.compare import RunSummary, read_run
from train.report.compare_table import measured_lines
from train.report.run_plots import draw_curves
from train.report.verdict import verdict_markdown
from train.report.web import PAGE_SUFFIX, write_html

CURVES = "curves.png"
NOTE = (
    "Tokens per target pass. The estimate simulates chains of drafted tokens on the training batches, from the agreement of "
    "draft and target; compare it with the measured `chain`. The speedup is that of the best policy, decoding only."
)
ESTIMATE = "estimated_tokens_per_pass"


def write_run_report(folder: Path, out: Path | None = None) -> Path:
    """Draws the curves of a run and writes its page.

    Args:
        out: path of the page, with the curves beside it; None: `report.md` in the run folder.

    Returns:
        the path of the page.

    Raises:
        ConfigError: `folder` is not a run, or no step was logged.
    """
    if not run_folder.is_run(folder):
        raise ConfigError(f"{folder}: not a run folder ({run_folder.CONFIG} is missing); give a folder written by sage-train")
    run, lines = read_run(folder), read_metrics(folder / METRICS)
    if not lines:
        raise ConfigError(f"{folder}: {METRICS} contains no step yet; steps are logged every train.log_every")
    measured = measured_against_estimate(lines, read_reports(folder))
    path = out or folder / run_folder.REPORT_PAGE
    with style.rc_context():
        style.save(draw_curves(folder.name, lines, measured), path.parent / CURVES)
    text = page(run, lines, measured, path.parent)
    write_text(path, text)
    write_html(text, path.with_suffix(PAGE_SUFFIX))
    return path


def measured_against_estimate(
    lines: Sequence[dict[str, Any]], reports: Sequence[tuple[int, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Returns one row per validation: its step, the last estimate logged before it, and the figures of every drafting policy.

    `ratio` is tokens per target pass measured for the policy `chain`, over the estimate, which simulates such chains.
    """
    steps = [line["step"] for line in lines]
    rows = []
    for step, report in reports:
        place = bisect.bisect_right(steps, step) - 1
        estimate = lines[place].get(ESTIMATE) if place >= 0 else None
        policies = {name: part for name, part in report["policies"].items() if name != AUTOREGRESSIVE}
        chain = policies.get(CHAIN, {}).get("tokens_per_target_pass")
        ratio = chain / estimate if chain is not None and estimate else None
        row = {"step": step, "estimate": estimate, "ratio": ratio, "policies": policies}
        rows.append(row | {"measured_with": measured_with(report)})
    return rows


def page(run: RunSummary, lines: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]], home: Path) -> str:
    """Returns the content of report.md; links are relative to `home`, the folder of the page."""
    folder = run.folder
    reports = read_reports(folder)
    head = [
        _headline(run, lines[-1], measured),
        _own_answers(lines),
        _dropped(lines),
        verdict_markdown(reports[-1][1]) if reports else "",
    ]
    parts = [f"# Run `{folder.name}`", *head, f"![Curves of the run]({CURVES})"]
    if changed := run_folder.describe_recipe_changes(folder):
        parts.append("\n".join(["The training recipe was changed:", "", *(f"* {line}" for line in changed)]))
    if measured:
        parts += [
            "## Estimated and measured acceptance",
            _table(measured),
            "\n".join(measured_lines({f"* step {row['step']:,}": row["measured_with"] for row in measured})),
            NOTE,
        ]
    parts += ["## Files", _files(folder, home)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(run: RunSummary, last: dict[str, Any], measured: Sequence[dict[str, Any]]) -> str:
    minutes = last["time_s"] / 60
    text = f"{last['step']:,} steps, {last['tokens']:,} tokens in {minutes:.1f} minutes of training; loss {last['loss']:.4f}."
    if run.score is None:
        return text
    named = f"{run.score_metric} of `{run_folder.score_policy(run.policies, run.score_policy)}`"
    is_kept = run_folder.draft_step(run.folder / run_folder.BEST_DRAFT) == run.best_step
    text += f" Best {named}: **{run.score:.2f}**, after step {run.best_step:,}{' (`draft_best/`)' if is_kept else ''}."
    return f"{text} {_fastest(run, measured)}".rstrip()


def _fastest(run: RunSummary, measured: Sequence[dict[str, Any]]) -> str:
    """Returns a sentence with the highest speedup if another step or policy has it than the best score."""
    found = [(float(part["speedup"]), row["step"], name) for row in measured for name, part in row["policies"].items()]
    speedup, step, name = max(found, default=(0.0, run.best_step, None))
    if (step, name) == (run.best_step, run_folder.score_policy(run.policies, run.score_policy)) or name is None:
        return ""
    return f"By speed, the best is `{name}` after step {step:,}: **{speedup:.2f}x**."


def _own_answers(lines: Sequence[dict[str, Any]]) -> str:
    found = next((line for line in lines if OWN_ANSWERS in line), None)
    if found is None:
        return ""
    prefix = f"{OWN_ANSWERS}/"
    listed = listed_shares({key.removeprefix(prefix): share for key, share in found.items() if key.startswith(prefix)})
    text = "of the supervised tokens are the target's own choice"
    return f"{found[OWN_ANSWERS]:.0%} {text}{listed}, measured in the first steps."


def _dropped(lines: Sequence[dict[str, Any]]) -> str:
    found = next((line[DROPPED] for line in lines if DROPPED in line), None)
    return "" if found is None else f"{found:.0%} of the examples are longer than `data.max_length` and were dropped."


def _table(measured: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in measured for name in row["policies"]))
    head = ["step", "estimate", "measured / estimate", *(f"`{name}`" for name in names), "speedup", "identical"]
    rows = [
        [
            f"{row['step']:,}",
            _number(row["estimate"]),
            _number(row["ratio"]),
            *(_number(row["policies"].get(name, {}).get("tokens_per_target_pass")) for name in names),
            f"{max((part['speedup'] for part in row['policies'].values()), default=0.0):.2f}x",
            f"{sum(p['match'] for p in row['policies'].values())}/{sum(p['total'] for p in row['policies'].values())}",
        ]
        for row in measured
    ]
    return markdown_table(head, rows, ">")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _files(folder: Path, home: Path) -> str:
    known = {
        run_folder.DRAFT: "the draft when it was last saved",
        run_folder.BEST_DRAFT: "the draft with the best score",
        METRICS: "one line per log step",
        run_folder.CONFIG: "the resolved configuration",
        run_folder.PROVENANCE: "revision, versions, command line, data",
        "profile": "profiler traces",
    }
    links = [(name, folder / name, f": {text}") for name, text in known.items() if (folder / name).exists()]
    validations = {step: run_folder.validation_folder(folder, step) for step, _ in read_reports(folder)}
    links += [(f"validation at step {step:,}", path / run_folder.REPORT_PAGE, "") for step, path in validations.items()]
    checks = run_folder.list_checks(folder)
    links += [(f"later check {check.name}", check / run_folder.REPORT_PAGE, "") for check in checks]
    return "\n".join(f"* [{label}]({Path(os.path.relpath(path, home)).as_posix()}){text}" for label, path, text in links)

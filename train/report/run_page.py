"""The page and the curves of a run: training, and the estimated beside the measured tokens per target pass.

Everything is read from the run folder; `sage-report RUN` draws it again.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from checkpoints import run_folder
from checkpoints.run_folder import METRICS, read_metrics, read_reports
from data_prep.config import DROPPED
from data_prep.own_answers import OWN_ANSWERS, listed_shares
from sage.bench.report_table import measured_with
from sage.io.tables import markdown_table
from sage.trees import AUTOREGRESSIVE, CHAIN
from train.config.schema import ConfigError
from train.report import style
from train.report.compare import RunSummary, measured_lines, read_run
from train.report.verdict import ESTIMATE, verdict_markdown
from train.report.web import write_report

CURVES = "curves.png"
NOTE = (
    "Tokens per target pass. The estimate simulates chains of drafted tokens on the training batches, from the agreement of "
    "draft and target; compare it with the measured `chain`. The speedup is that of the best policy, decoding only."
)
Lines = Sequence[dict[str, Any]]
LOSSES = (("loss", style.INK), ("loss_ce", "#2f6fa7"), ("loss_feature", "#d98e4a"))
NAMES = {  # of metrics in legends
    "loss": "total",
    "loss_ce": "cross-entropy",
    "loss_feature": "features",
    "agreement": "agreement of the top tokens",
    "acceptance": "acceptance probability",
}
HEIGHT_IN = 7.4
DODGED = 0.07  # share of the steps over which the dots of one validation are spread
LOG_SCALE_RATIO = 50.0  # curves that span a larger factor have a logarithmic axis


def write_run_report(folder: Path, out: Path | None = None) -> Path:
    """Draws the curves of a run and writes its page beside them, by default in the run folder; returns its path.

    Raises:
        ConfigError: `folder` is not a run, or no step was logged.
    """
    run, lines = read_run(folder), read_metrics(folder / METRICS)
    if not lines:
        raise ConfigError(f"{folder}: {METRICS} contains no step yet; steps are logged every train.log_every")
    measured = measured_against_estimate(lines, read_reports(folder))
    path = (out or folder) / run_folder.REPORT_PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    with style.rc_context():
        style.save(draw_curves(folder.name, lines, measured), path.parent / CURVES)
    write_report(page(run, lines, measured, path.parent), path)
    return path


def measured_against_estimate(lines: Lines, reports: Sequence[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
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


def page(run: RunSummary, lines: Lines, measured: Lines, home: Path) -> str:
    """Returns the content of report.md; links are relative to `home`, the folder of the page."""
    folder = run.folder
    reports = read_reports(folder)
    dropped = next((f"{line[DROPPED]:.0%}" for line in lines if DROPPED in line), None)
    parts = [
        f"# Run `{folder.name}`",
        _headline(run, lines[-1], measured),
        _own_answers(lines),
        f"{dropped} of the examples are longer than `data.max_length` and were dropped." if dropped else "",
        verdict_markdown(reports[-1][1]) if reports else "",
        f"![Curves of the run]({CURVES})",
    ]
    if changed := run_folder.recipe_changes(folder):
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


def _headline(run: RunSummary, last: dict[str, Any], measured: Lines) -> str:
    minutes = last["time_s"] / 60
    text = f"{last['step']:,} steps, {last['tokens']:,} tokens in {minutes:.1f} minutes of training; loss {last['loss']:.4f}."
    if run.score is None:
        return text
    metric, _, scored = (run.scored_by or "").partition(" of ")
    is_kept = run_folder.draft_step(run.folder / run_folder.BEST_DRAFT) == run.best_step
    kept = " (`draft_best/`)" if is_kept else ""
    text += f" Best {metric} of `{scored}`: **{run.score:.2f}**, after step {run.best_step:,}{kept}."
    speeds = [(float(part["speedup"]), row["step"], name) for row in measured for name, part in row["policies"].items()]
    speedup, step, name = max(speeds, default=(0.0, run.best_step, scored))
    if (step, name) != (run.best_step, scored):
        text += f" By speed, the best is `{name}` after step {step:,}: **{speedup:.2f}x**."
    return text


def _own_answers(lines: Lines) -> str:
    found = next((line for line in lines if OWN_ANSWERS in line), None)
    if found is None:
        return ""
    prefix = f"{OWN_ANSWERS}/"
    listed = listed_shares({key.removeprefix(prefix): share for key, share in found.items() if key.startswith(prefix)})
    text = "of the supervised tokens are the target's own choice"
    return f"{found[OWN_ANSWERS]:.0%} {text}{listed}, measured in the first steps."


def _table(measured: Lines) -> str:
    names = list(dict.fromkeys(name for row in measured for name in row["policies"]))
    head = ["step", "estimate", "measured / estimate", *(f"`{name}`" for name in names), "speedup", "identical"]
    rows = []
    for row in measured:
        policies = row["policies"].values()
        tokens = (row["policies"].get(name, {}).get("tokens_per_target_pass") for name in names)
        numbers = ("-" if value is None else f"{value:.2f}" for value in (row["estimate"], row["ratio"], *tokens))
        speedup = max((part["speedup"] for part in policies), default=0.0)
        same = f"{sum(part['match'] for part in policies)}/{sum(part['total'] for part in policies)}"
        rows.append([f"{row['step']:,}", *numbers, f"{speedup:.2f}x", same])
    return markdown_table(head, rows, ">")


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


def draw_curves(name: str, lines: Lines, measured: Lines) -> Figure:
    steps = [line["step"] for line in lines]
    made = style.figure(HEIGHT_IN, f"Run {name}", f"{steps[-1]:,} optimizer steps, {lines[-1]['tokens']:,} tokens")
    panels = made.subplots(3, 2, sharex=True)
    _curves(panels[0][0], lines, LOSSES, "loss")
    _curves(panels[0][1], lines, (("agreement", "#2f6fa7"), ("acceptance", "#b23a6b")), "agreement of draft and target")
    panels[0][1].set(yscale="linear", ylim=(0, 1.02))
    if estimated := [(line["step"], line[ESTIMATE]) for line in lines if ESTIMATE in line]:
        panels[1][0].plot(*zip(*estimated, strict=True), color=style.FAINT, linewidth=1.3, label="estimated (chain)")
    _dots(panels[1][0], measured, "tokens_per_target_pass")
    _title(panels[1][0], "tokens per target pass", has_legend=bool(panels[1][0].lines))
    _dots(panels[1][1], measured, "speedup")
    panels[1][1].axhline(1.0, **style.BASELINE)
    title = "speedup, decoding only" if measured else "speedup: no validation yet"
    _title(panels[1][1], title, has_legend=any(row["policies"] for row in measured))
    _curves(panels[2][0], lines, (("grad_norm", "#6f9e74"),), "gradient norm")
    _rate_and_speed(panels[2][1], lines)
    for axes in panels.flat:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        style.despine(axes)
    for axes in panels[2]:
        axes.set_xlabel("step")
    return made


def _curves(axes: Axes, lines: Lines, names: Sequence[tuple[str, str]], title: str) -> None:
    known = [(name, color) for name, color in names if name in lines[-1] and any(line.get(name) for line in lines)]
    for name, color in known:
        found = [(line["step"], line[name]) for line in lines if name in line]
        axes.plot(*zip(*found, strict=True), color=color, linewidth=1.5, label=NAMES.get(name, name))
    values = [line[name] for name, _ in known for line in lines if line.get(name)]
    if values and min(values) > 0 and max(values) > LOG_SCALE_RATIO * min(values):
        axes.set_yscale("log")
    _title(axes, title, has_legend=len(known) > 1)


def _dots(axes: Axes, measured: Lines, figure: str) -> None:
    """Draws the figure of every policy over steps; the policies are shifted, so that equal dots lie side by side."""
    names = list(dict.fromkeys(name for row in measured for name in row["policies"]))
    width = DODGED * max((row["step"] for row in measured), default=0)
    for place, name in enumerate(names):
        offset = style.dodged(place, len(names), width)
        found = [(row["step"] + offset, row["policies"][name][figure]) for row in measured if name in row["policies"]]
        color = style.policy_color(name, names)
        axes.plot(*zip(*found, strict=True), color=color, linewidth=1.0, marker="o", markersize=4.5, label=name)


def _rate_and_speed(axes: Axes, lines: Lines) -> None:
    steps = [line["step"] for line in lines]
    axes.plot(steps, [line["tokens_per_s"] for line in lines], color="#4f9aa8", linewidth=1.5)
    axes.set_ylim(bottom=0)
    _title(axes, "training tokens/s; dashed: learning rate")
    twin = axes.twinx()
    twin.spines[["top", "right", "left"]].set_visible(False)
    twin.plot(steps, [line["lr"] for line in lines], color=style.FAINT, linewidth=1.2, linestyle=(0, (3, 2)))
    twin.set_ylim(bottom=0)
    twin.yaxis.set_major_formatter("{x:g}")
    twin.tick_params(length=0, labelsize=8.5)
    twin.set_ylabel("learning rate", fontsize=9)


def _title(axes: Axes, text: str, has_legend: bool = False) -> None:
    axes.set_title(text, fontsize=10, loc="left")
    if has_legend:
        looks: dict[str, Any] = {"frameon": True, "facecolor": "white", "edgecolor": "none", "framealpha": 0.8}
        axes.legend(loc="best", handlelength=1.2, fontsize=8.5, **looks)

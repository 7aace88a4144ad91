"""The Markdown page of a validation with its plots. All figures come from report.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from checkpoints.run_folder import REPORT_PAGE
from sage.bench.report_table import (
    HEADER,
    SHARE_HEADER,
    SHARE_NOTE,
    interruption,
    margins,
    measured_with,
    share_rows,
    speed_rows,
)
from sage.io.tables import counted, markdown_table
from sage.trees import AUTOREGRESSIVE
from train.report import style
from train.report.verdict import best_policy, verdict_markdown
from train.report.web import Report, prompt_section, write_report

MIN_ROUNDS = 10  # of an acceptance rate that is drawn; shares of fewer are mostly noise

SPEED_NOTE = (
    "Speeds are those of decoding only: the clock starts after the target's prefill, which produces the first token, and "
    "includes the draft's prefill; \\* is the baseline of the speedups. *End to end* includes the vision tower and both "
    "prefills. *Accepted* excludes the token that every target pass produces, *tokens/pass* includes it. *Identical* compares "
    "outputs with the target's own, *to HF* with those of Hugging Face `generate`."
)


def render_page(report: Report, plots: Sequence[Plot] = ()) -> str:
    """Returns the page as Markdown. Plots are embedded by relative name, so that the folder can be moved."""
    parts = [
        f"# Validation of `{report['draft']}` on {report['target']}",
        f"**{interruption(report['partial']).capitalize()}.**" if "partial" in report else "",
        headline(report),
        verdict_markdown(report),
        _policies(report),
        "\n".join(f"![{plot.caption}]({plot.file})" for plot in plots),
        f"## Decoding time\n\n{markdown_table(SHARE_HEADER, shares)}\n\n{SHARE_NOTE}."
        if (shares := share_rows(report))
        else "",
        _families(report),
        _setup(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_pages(report: Report, folder: Path, out: Path | None = None) -> Path:
    """Draws the plots of the report in `folder` and writes its pages beside them, both in `out` if given; returns the path of
    the Markdown.
    """
    path = (out or folder) / REPORT_PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    text = render_page(report, write_plots(report, path.parent))
    write_report(text, path, prompt_section(report, folder, path))
    return path


def headline(report: Report) -> str:
    """Returns the speedup of the fastest speculative policy, and whether all outputs are identical, as sentences."""
    name, drafting = best_policy(report), [part for name, part in report["policies"].items() if name != AUTOREGRESSIVE]
    if name is None:
        return "Only autoregressive decoding was measured."
    part = report["policies"][name]
    factor = f"**{part['speedup']:.2f}x**"
    speed = f"{factor} faster than" if part["speedup"] > 1 else f"**slower**, at {factor} the speed of"
    match, total = sum(part["match"] for part in drafting), sum(part["total"] for part in drafting)
    reference = "greedy decoding of the target" if report["temperature"] == 0 else "sampling from the target with the same seed"
    return (
        f"`{name}` decodes {speed} the fastest autoregressive baseline (`{report['fastest_baseline']}`), "
        f"with {part['tokens_per_target_pass']:.2f} tokens per target pass. "
        f"{f'All {total}' if match == total else f'{match} of {total}'} outputs are identical to {reference}."
    )


def _policies(report: Report) -> str:
    rows = [row for part in speed_rows(report) for row in part]
    failed = [f"`{name}` was left out: {reason}." for name, reason in report["failed_baselines"].items()]
    parts = [markdown_table(HEADER, rows), f"Measured with {measured_with(report)}.", SPEED_NOTE]
    gaps = {name: part["first_gaps"] for name, part in report["policies"].items() if part["first_gaps"]}
    if gaps:  # outputs can differ in low precision
        texts = (f"`{name}` {', '.join(f'{gap:.2g}' for gap in values)}" for name, values in gaps.items())
        parts.append(f"Gap of the top two logits at the first difference: {'; '.join(texts)}.")
    return "\n\n".join([*parts, *([f"{margins(report)}."] if margins(report) else []), *failed])


def _families(report: Report) -> str:
    if not report["by_family"]:
        return ""
    rows = [
        [family, str(part["prompts"]), f"`{name}`", f"{part['tokens_per_target_pass']:.2f}", f"{part['speedup']:.2f}x"]
        for family, policies in report["by_family"].items()
        for name, part in policies.items()
        if name != AUTOREGRESSIVE
    ]
    head = ["task", "prompts", "policy", "tokens per target pass", "speedup"]
    return f"## By task\n\n{markdown_table(head, rows, '<><>')}"


def _setup(report: Report) -> str:
    machine = report["machine"]
    cores = f"{counted(machine['cores'], 'core')}, {counted(machine['torch_threads'], 'thread')}"
    processor = machine.get("gpu") or f"{machine['cpu']}, {cores}"
    load = f"load average {machine['load_average']:.1f} during the last minute"
    facts = [f"{measured_with(report)}, seed {report['seed']}", f"{processor}, {load}, {machine['system']}"]
    facts += [f"passes: {report['passes']}"] if "passes" in report else []
    facts += [f"draft after {counted(report['step'], 'training step')}"] if report.get("step") is not None else []
    facts.append(", ".join(f"{package} {number}" for package, number in report["versions"].items()))
    command = f"\n\n```\n{report['command']}\n```" if report.get("command") else ""
    return "## Setup\n\n" + "\n".join(f"- {fact}" for fact in facts) + command


@dataclass(frozen=True)
class Plot:
    """A plot: file name beside the report, caption, and the function that draws it; None without data."""

    file: str
    caption: str
    draw: Callable[[Report], Figure | None]


def write_plots(report: Report, directory: Path) -> list[Plot]:
    """Writes every plot with data as a PNG into `directory`; returns them in reading order."""
    written = []
    for plot in PLOTS:
        with style.rc_context():
            if (made := plot.draw(report)) is not None:
                style.save(made, directory / plot.file)
                written.append(plot)
    return written


def draw_speed(report: Report) -> Figure | None:
    rows = [(name, section, style.policy_color(name, report["policies"])) for name, section in report["policies"].items()]
    rows += [(name, part, style.BAND) for name, part in report["baselines"].items() if name not in report["policies"]]
    made = style.figure(
        1.25 + 0.38 * len(rows),
        f"Decoding speed: {report['target']}",
        f"speedup over the fastest autoregressive baseline ({report['fastest_baseline']}), decoding only; 95% intervals",
    )
    axes = made.subplots()
    right = max(1.0, *(part.get("speedup_ci", [0, part["speedup"]])[1] for _, part, _ in rows))
    for place, (_, part, color) in enumerate(rows):
        axes.barh(place, part["speedup"], height=0.62, color=color)
        if "speedup_ci" in part and part["speedup_ci"][0] != part["speedup_ci"][1]:
            ends = part["speedup_ci"], [place, place]
            axes.plot(*ends, "|-", color=style.INK, markersize=6, linewidth=1.3, solid_capstyle="butt")
        _beside(axes, place, 46, f"{part['speedup']:.2f}x", fontweight="bold")
        _beside(axes, place, 118, f"{part['tokens_per_s']:.0f} tokens/s", color=style.FAINT)
    axes.axvline(1.0, **style.BASELINE)
    axes.set_xlim(0, right * 1.04)
    style.label_bars(axes, [name for name, _, _ in rows])
    style.despine(axes, "x")
    return made


def draw_acceptance(report: Report) -> Figure | None:
    """Draws the conditional acceptance rate at each draft position that enough rounds reached."""
    curves: dict[str, dict[int, float]] = {}
    for name, part in report["policies"].items():
        reached = [level for level in part["acceptance_by_depth"] if level["tried"] >= MIN_ROUNDS]
        if reached:
            curves[name] = {level["depth"]: level["kept"] / level["tried"] for level in reached}
    if not curves:
        return None
    subtitle = f"of the rounds that accepted all tokens before it; positions that at least {MIN_ROUNDS} rounds reached"
    made = style.figure(3.9, "Acceptance rate by draft position", subtitle)
    axes = made.subplots()
    for place, (name, rates) in enumerate(curves.items()):
        offset, color = style.dodged(place, len(curves), 0.4), style.policy_color(name, report["policies"])
        positions = [depth + offset for depth in rates]
        axes.plot(positions, list(rates.values()), color=color, linewidth=1.8, marker="o", markersize=5, label=name)
    axes.set_xlabel("draft position")
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.4)
    style.despine(axes)
    return made


def draw_time(report: Report) -> Figure | None:
    policies = report["policies"]
    phases = [phase for phase in style.PHASES if any(part["time_s"].get(phase, 0) > 0 for part in policies.values())]
    if not phases:
        return None
    made = style.figure(
        1.75 + 0.38 * len(policies), "Decoding time by phase", "milliseconds per generated token, after the target's prefill"
    )
    axes = made.subplots()
    lengths = []
    for place, part in enumerate(policies.values()):
        left, total_s = 0.0, sum(part["time_s"].get(phase, 0.0) for phase in style.PHASES)
        for phase in phases if total_s > 0 and part["tokens_per_s"] > 0 else ():
            label, color = style.PHASES[phase]
            # the shares of the prompts' median runs in the time of the tables, 1 / `tokens_per_s`
            width = 1e3 / part["tokens_per_s"] * part["time_s"].get(phase, 0.0) / total_s
            axes.barh(place, width, left=left, height=0.62, color=color, label=label if place == 0 else None)
            left += width
        axes.text(left, place, f"  {left:.2f} ms", va="center", fontsize=9.5)
        lengths.append(left)
    axes.set_xlim(0, max(lengths) * 1.16)
    style.label_bars(axes, list(policies))
    style.legend_below(made, 4, handlelength=1.0)
    style.despine(axes, "x")
    return made


def _beside(axes: Axes, place: int, points: float, text: str, **looks: Any) -> None:
    """Draws text in a column right of the axes that ends `points` from their edge."""
    looks |= {"va": "center", "ha": "right", "fontsize": 9.5, "annotation_clip": False}
    right = axes.get_yaxis_transform()
    axes.annotate(text, (1.0, place), xycoords=right, xytext=(points, 0), textcoords="offset points", **looks)


PLOTS = (
    Plot("speed.png", "Decoding speed over the fastest autoregressive baseline of the same run.", draw_speed),
    Plot("acceptance.png", "Acceptance rate of drafted tokens, by draft position.", draw_acceptance),
    Plot("time.png", "Decoding time per token by phase.", draw_time),
)

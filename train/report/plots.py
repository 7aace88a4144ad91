"""The plots of a validation report, drawn from `report.json` alone: the list of all plots, and those over all policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from train.report import style
from train.report.calibration import draw_calibration
from train.report.generation import draw_generation, draw_pricing

Report = Mapping[str, Any]
MAX_COLUMNS = 4
MIN_ROUNDS = 10  # shares of fewer rounds are mostly noise and drawn hollow


@dataclass(frozen=True)
class Plot:
    """A plot: its file name beside the report, and its caption."""

    file: str
    caption: str


def write_plots(report: Report, directory: Path) -> list[Plot]:
    """Writes every plot with data as a PNG into `directory`; returns them in reading order."""
    written = []
    for file, caption, draw in PLOTS:
        with style.rc_context():
            made = draw(report)
            if made is not None:
                style.save(made, directory / file)
                written.append(Plot(file, caption))
    return written


def draw_speed(report: Report) -> Figure | None:
    """Draws the decoding speedup of policies and baselines with 95% intervals."""
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
        _whisker(axes, place, part)
        _beside(axes, place, 46, f"{part['speedup']:.2f}x", fontweight="bold")
        _beside(axes, place, 118, f"{part['tokens_per_s']:.0f} tokens/s", color=style.FAINT)
    axes.axvline(1.0, color=style.INK, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_xlim(0, right * 1.04)
    axes.invert_yaxis()
    style.despine(axes, "x")
    return made


def draw_acceptance(report: Report) -> Figure | None:
    """Draws the conditional acceptance rate at each draft position."""
    curves = {name: part["acceptance_by_depth"] for name, part in report["policies"].items() if part["acceptance_by_depth"]}
    if not curves:
        return None
    made = style.figure(
        3.9,
        "Acceptance rate by draft position",
        f"share of rounds that accept the token at this depth, given all tokens before it (hollow: under {MIN_ROUNDS} rounds)",
    )
    axes = made.subplots()
    for name, levels in curves.items():
        color = style.policy_color(name, report["policies"])
        depths, shares = [level["depth"] for level in levels], [level["kept"] / level["tried"] for level in levels]
        axes.plot(depths, shares, color=color, linewidth=2.0, label=name, zorder=2)
        faces = [color if level["tried"] >= MIN_ROUNDS else "white" for level in levels]
        axes.scatter(depths, shares, s=30, c=faces, edgecolors=color, linewidths=1.5, zorder=3)
    axes.set_xlabel("draft position")
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.4)
    style.despine(axes)
    return made


def draw_time(report: Report) -> Figure | None:
    """Draws the decoding time per token, stacked by phase."""
    policies = report["policies"]
    phases = [phase for phase in style.PHASES if any(part["time_s"].get(phase, 0) > 0 for part in policies.values())]
    if not phases:
        return None
    made = style.figure(
        1.75 + 0.38 * len(policies), "Decoding time by phase", "milliseconds per generated token, after the target's prefill"
    )
    axes = made.subplots()
    longest = 0.0
    for place, part in enumerate(policies.values()):
        left = 0.0
        for phase in phases:
            width = 1e3 * part["time_s"].get(phase, 0.0) / max(part["tokens"], 1)
            name, color = style.PHASES[phase]
            axes.barh(place, width, left=left, height=0.62, color=color, label=name if place == 0 else None)
            left += width
        axes.text(left, place, f"  {left:.2f} ms", va="center", fontsize=9.5)
        longest = max(longest, left)
    axes.set_yticks(range(len(policies)), list(policies))
    axes.set_xlim(0, longest * 1.16)
    axes.invert_yaxis()
    made.legend(loc="outside lower center", ncols=4, handlelength=1.0)
    style.despine(axes, "x")
    return made


def draw_accepted(report: Report) -> Figure | None:
    """Draws histograms of the drafted tokens accepted per round."""
    counts = {name: part["accepted_histogram"] for name, part in report["policies"].items()}
    counts = {name: bins for name, bins in counts.items() if len(bins) > 1}
    if not counts:
        return None
    rows = -(-len(counts) // MAX_COLUMNS)
    columns = -(-len(counts) // rows)
    made = style.figure(1.15 + 1.65 * rows, "Drafted tokens accepted per round", "share of rounds; line and number: mean")
    grid = made.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place >= len(counts):
            axes.set_visible(False)
            continue
        name = list(counts)[place]
        mean = report["policies"][name]["mean_accepted_draft"]
        _histogram(axes, counts[name], style.policy_color(name, report["policies"]), mean)
        axes.tick_params(labelbottom=place + columns >= len(counts))
        axes.set_title(f"{name}  {mean:.2f}", fontsize=10, loc="left")
    made.supxlabel("drafted tokens accepted", fontsize=10)
    return made


def _histogram(axes: Any, bins: list[int], color: str, mean: float) -> None:
    shares = [value / sum(bins) for value in bins]
    axes.bar(range(len(bins)), shares, width=0.8, color=color)
    axes.axvline(mean, color=style.INK, linewidth=1.2)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    style.despine(axes)


def _beside(axes: Any, place: int, points: float, text: str, **looks: Any) -> None:
    """Draws text in a column right of the axes that ends `points` from their edge."""
    looks |= {"va": "center", "ha": "right", "fontsize": 9.5, "annotation_clip": False}
    right = axes.get_yaxis_transform()
    axes.annotate(text, (1.0, place), xycoords=right, xytext=(points, 0), textcoords="offset points", **looks)


def _whisker(axes: Any, place: int, part: Mapping[str, Any]) -> None:
    if "speedup_ci" not in part or part["speedup_ci"][0] == part["speedup_ci"][1]:
        return
    axes.plot(part["speedup_ci"], [place, place], color=style.INK, linewidth=1.3, solid_capstyle="butt")
    axes.plot(part["speedup_ci"], [place, place], "|", color=style.INK, markersize=6)


PLOTS: tuple[tuple[str, str, Callable[[Report], Figure | None]], ...] = (
    ("speed.png", "Decoding speed over the fastest autoregressive baseline of the same run.", draw_speed),
    ("acceptance.png", "Acceptance rate of drafted tokens, by draft position.", draw_acceptance),
    ("time.png", "Decoding time per token by phase.", draw_time),
    ("accepted.png", "Drafted tokens accepted per round.", draw_accepted),
    ("generation.png", "Confidence of the draft, depth and nodes of the tree, round by round.", draw_generation),
    ("pricing.png", "Price of time, depth, nodes, expected gain and cost, round by round.", draw_pricing),
    ("calibration.png", "Observed acceptance by predicted acceptance probability.", draw_calibration),
)

"""The plots of a report, each from the dictionary alone. One function per picture; `write_plots` draws those that apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from train.report import style
from train.report.calibration import draw_calibration
from train.report.generation import draw_generation
from train.report.pricing import draw_pricing

Report = Mapping[str, Any]
MOST_COLUMNS = 4
FEW_ROUNDS = 10  # a share of fewer rounds is drawn hollow: it is mostly noise


@dataclass(frozen=True)
class Plot:
    """A written picture: its file name beside the report, and the sentence that goes with it."""

    file: str
    caption: str


def write_plots(report: Report, directory: Path) -> list[Plot]:
    """Draw every plot that has data and write it as a PNG into `directory`; returns them in reading order."""
    written = []
    for file, caption, draw in PLOTS:
        with style.look():
            made = draw(report)
            if made is not None:
                style.save(made, directory / file)
                written.append(Plot(file, caption))
    return written


def draw_speed(report: Report) -> Figure | None:
    """Decode speedup by policy with 95% intervals, other decoders below in grey, the baseline as a line at 1."""
    rows = [(name, section, style.colour(name, report["policies"])) for name, section in report["policies"].items()]
    rows += [(name, part, style.BAND) for name, part in report["baselines"].items() if name not in report["policies"]]
    made = style.figure(
        1.25 + 0.38 * len(rows),
        f"Decoding speed: {report['target']}",
        f"times the fastest autoregressive baseline ({report['fastest_baseline']}), decode only, 95% interval over prompts",
    )
    axes = made.subplots()
    right = max(1.0, *(part.get("speedup_ci", [0, part["speedup"]])[1] for _, part, _ in rows))
    for place, (_, part, shade) in enumerate(rows):
        axes.barh(place, part["speedup"], height=0.62, color=shade)
        _whisker(axes, place, part)
        _beside(axes, place, 46, f"{part['speedup']:.2f}x", fontweight="bold")
        _beside(axes, place, 118, f"{part['tokens_per_s']:.0f} tokens/s", color=style.FAINT)
    axes.axvline(1.0, color=style.INK, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_xlim(0, right * 1.04)
    axes.invert_yaxis()
    style.quiet(axes, "x")
    return made


def draw_acceptance(report: Report) -> Figure | None:
    """Conditional acceptance at each draft position, a line per policy."""
    curves = {name: part["acceptance_by_depth"] for name, part in report["policies"].items() if part["acceptance_by_depth"]}
    if not curves:
        return None
    made = style.figure(
        3.9,
        "Acceptance by draft position",
        f"share of rounds that keep the token at this depth, given all before it (hollow: under {FEW_ROUNDS} rounds)",
    )
    axes = made.subplots()
    for name, levels in curves.items():
        shade = style.colour(name, report["policies"])
        depths, shares = [level["depth"] for level in levels], [level["kept"] / level["tried"] for level in levels]
        axes.plot(depths, shares, color=shade, linewidth=2.0, label=name, zorder=2)
        faces = [shade if level["tried"] >= FEW_ROUNDS else "white" for level in levels]
        axes.scatter(depths, shares, s=30, c=faces, edgecolors=shade, linewidths=1.5, zorder=3)
    axes.set_xlabel("draft position")
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.4)
    style.quiet(axes)
    return made


def draw_time(report: Report) -> Figure | None:
    """Where a token's decoding time goes, stacked by stage, a bar per policy."""
    policies = report["policies"]
    stages = [stage for stage in style.STAGE_COLOURS if any(part["time_s"].get(stage, 0) > 0 for part in policies.values())]
    if not stages:
        return None
    made = style.figure(
        1.75 + 0.38 * len(policies), "Where the time goes", "milliseconds per generated token, after the target's prefill"
    )
    axes = made.subplots()
    longest = 0.0
    for place, part in enumerate(policies.values()):
        left = 0.0
        for stage in stages:
            width = 1e3 * part["time_s"].get(stage, 0.0) / max(part["tokens"], 1)
            label = style.STAGE_NAMES[stage] if place == 0 else None
            axes.barh(place, width, left=left, height=0.62, color=style.STAGE_COLOURS[stage], label=label)
            left += width
        axes.text(left, place, f"  {left:.2f} ms", va="center", fontsize=9.5)
        longest = max(longest, left)
    axes.set_yticks(range(len(policies)), list(policies))
    axes.set_xlim(0, longest * 1.16)
    axes.invert_yaxis()
    made.legend(loc="outside lower center", ncols=4, handlelength=1.0)
    style.quiet(axes, "x")
    return made


def draw_accepted(report: Report) -> Figure | None:
    """How many drafted tokens a round keeps: a small histogram per policy, the mean as a line."""
    counts = {name: part["accepted_histogram"] for name, part in report["policies"].items()}
    counts = {name: bins for name, bins in counts.items() if len(bins) > 1}
    if not counts:
        return None
    rows = -(-len(counts) // MOST_COLUMNS)
    columns = -(-len(counts) // rows)
    made = style.figure(
        1.15 + 1.65 * rows, "Drafted tokens accepted per round", "share of rounds; the line and the number are the mean"
    )
    grid = made.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place >= len(counts):
            axes.set_visible(False)
            continue
        name = list(counts)[place]
        mean = report["policies"][name]["mean_accepted_draft"]
        _histogram(axes, counts[name], style.colour(name, report["policies"]), mean)
        axes.tick_params(labelbottom=place + columns >= len(counts))
        axes.set_title(f"{name}  {mean:.2f}", fontsize=10, loc="left")
    made.supxlabel("drafted tokens accepted", fontsize=10)
    return made


def _histogram(axes: Any, bins: list[int], shade: str, mean: float) -> None:
    shares = [value / sum(bins) for value in bins]
    axes.bar(range(len(bins)), shares, width=0.8, color=shade)
    axes.axvline(mean, color=style.INK, linewidth=1.2)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    style.quiet(axes)


def _beside(axes: Any, place: int, points: float, text: str, **looks: Any) -> None:
    """Text in a column right of the axes, ending `points` from its edge."""
    axes.annotate(
        text,
        (1.0, place),
        xycoords=axes.get_yaxis_transform(),
        xytext=(points, 0),
        textcoords="offset points",
        va="center",
        ha="right",
        fontsize=9.5,
        annotation_clip=False,
        **looks,
    )


def _whisker(axes: Any, place: int, part: Mapping[str, Any]) -> None:
    if "speedup_ci" not in part or part["speedup_ci"][0] == part["speedup_ci"][1]:
        return
    low, high = part["speedup_ci"]
    axes.plot([low, high], [place, place], color=style.INK, linewidth=1.3, solid_capstyle="butt")
    axes.plot([low, high], [place, place], "|", color=style.INK, markersize=6)


PLOTS: tuple[tuple[str, str, Callable[[Report], Figure | None]], ...] = (
    ("speed.png", "Decode-only speed against the fastest autoregressive baseline of the same run.", draw_speed),
    ("acceptance.png", "How likely the target keeps a drafted token, by how far ahead it was drafted.", draw_acceptance),
    ("time.png", "Decoding time per token by stage.", draw_time),
    ("accepted.png", "Drafted tokens that each round keeps.", draw_accepted),
    ("generation.png", "The draft's confidence over one generation, and the tree that was built from it.", draw_generation),
    ("pricing.png", "Why each tree was built: the price of time, the tree, and whether another level paid.", draw_pricing),
    ("calibration.png", "How often the target chose what the draft proposed, by predicted chance.", draw_calibration),
)

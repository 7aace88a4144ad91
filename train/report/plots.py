"""The plots of a validation report, drawn from `report.json` alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from train.report import style

Report = Mapping[str, Any]
MIN_ROUNDS = 10  # shares of fewer rounds are mostly noise


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
    shares = {
        name: {
            level["depth"]: level["kept"] / level["tried"]
            for level in part["acceptance_by_depth"]
            if level["tried"] >= MIN_ROUNDS
        }
        for name, part in report["policies"].items()
    }
    curves = {name: found for name, found in shares.items() if found}
    if not curves:
        return None
    subtitle = f"of the rounds that accepted all tokens before it; positions that at least {MIN_ROUNDS} rounds reached"
    made = style.figure(3.9, "Acceptance rate by draft position", subtitle)
    axes = made.subplots()
    for place, (name, found) in enumerate(curves.items()):
        offset, color = style.dodged(place, len(curves), 0.4), style.policy_color(name, report["policies"])
        positions = [depth + offset for depth in found]
        axes.plot(positions, list(found.values()), color=color, linewidth=1.8, marker="o", markersize=5, label=name)
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
    lengths = [style.phase_bar(axes, place, part, phases) for place, part in enumerate(policies.values())]
    for place, length in enumerate(lengths):
        axes.text(length, place, f"  {length:.2f} ms", va="center", fontsize=9.5)
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

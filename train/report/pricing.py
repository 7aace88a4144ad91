"""Why `cost_aware` built the trees it built: its price of time, the trees, and what the last level weighed was worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from train.report import style

Log = Sequence[Mapping[str, Any]]
SHADE = "#b23a6b"


def draw_pricing(report: Mapping[str, Any]) -> Figure | None:
    """The longest generation of the first policy that prices time; None where none does."""
    name = next((name for name, part in report["policies"].items() if _is_priced(part["example"]["rounds_log"])), None)
    if name is None:
        return None
    example = report["policies"][name]["example"]
    log = example["rounds_log"]
    made = style.figure(
        6.4,
        f"Why {name} built these trees",
        f"prompt {example['prompt']}, {len(log)} rounds, {sum(entry['accepted'] for entry in log)} drafted tokens accepted",
    )
    panels = made.subplots(4, 1, sharex=True, height_ratios=[0.8, 1.1, 0.9, 1.1])
    _price(panels[0], log)
    _depth(panels[1], log)
    _nodes(panels[2], log)
    _last_level(panels[3], log)
    panels[3].set_xlabel("round")
    panels[3].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[3].set_xlim(0.4, len(log) + 0.6)
    made.align_ylabels()
    return made


def _is_priced(log: Log) -> bool:
    return bool(log) and "expanded" in log[0]


def _rounds(log: Log) -> list[int]:
    return list(range(1, len(log) + 1))


def _price(axes: Axes, log: Log) -> None:
    prices = [entry["price"] for entry in log]
    axes.plot(_rounds(log), prices, color=SHADE, linewidth=1.8, marker="o", markersize=3.2)
    axes.set_ylim(0, 1.2 * max(prices))
    axes.set_ylabel("price\ntokens/s")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    style.quiet(axes)


def _depth(axes: Axes, log: Log) -> None:
    _bars(
        axes,
        log,
        (("levels", style.GRID, "levels drafted"), ("depth", style.BAND, "verified"), ("accepted", SHADE, "accepted")),
    )
    for place, entry in zip(_rounds(log), log, strict=True):
        label = "accepted, expected" if place == 1 else ""
        axes.hlines(entry["expected"], place - 0.42, place + 0.42, color=style.INK, linewidth=1.4, label=label)
    axes.legend(loc="upper right", ncols=4, handlelength=1.0, borderaxespad=0.1)
    axes.set_ylabel("depth")


def _nodes(axes: Axes, log: Log) -> None:
    _bars(axes, log, (("drafted", style.GRID, "nodes drafted"), ("nodes", style.BAND, "verified")))
    axes.set_ylabel("nodes")


def _end(entry: Mapping[str, Any]) -> str:
    """What became of the last level that was weighed."""
    if entry["gain"] <= entry["level_cost"]:
        return "expected: too little"
    return "drafted in vain" if entry["expanded"] > entry["levels"] else "drafted"


def _bars(axes: Axes, log: Log, series: Sequence[tuple[str, str, str]]) -> None:
    for key, shade, label in series:
        if key in log[0]:
            axes.bar(_rounds(log), [entry[key] for entry in log], width=0.84, color=shade, label=label)
    most = max(max(entry.get(key, 0) for key, _, _ in series) for entry in log)
    axes.set_ylim(0, 1.4 * max(most, 1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= most])  # none behind the legend
    axes.legend(loc="upper right", ncols=3, handlelength=1.0, borderaxespad=0.1)
    style.quiet(axes)


def _last_level(axes: Axes, log: Log) -> None:
    """Gain and price of the last level weighed; it was drafted where the gain was above, in vain where nothing came of it."""
    gains, costs = [entry["gain"] for entry in log], [entry["level_cost"] for entry in log]
    axes.vlines(_rounds(log), costs, gains, color=style.GRID, linewidth=2.5, zorder=1)
    axes.scatter(
        _rounds(log),
        costs,
        marker="_",
        s=90,
        color=style.INK,
        linewidths=1.8,
        label="its time is worth",
        zorder=2,
    )
    for face, label in (("white", "expected: too little"), (style.BAND, "drafted in vain"), (SHADE, "drafted")):
        rounds = [number for number, entry in enumerate(log, start=1) if _end(entry) == label]
        own = [log[number - 1]["gain"] for number in rounds]
        axes.scatter(rounds, own, s=30, c=face, edgecolors=SHADE, linewidths=1.4, label=label, zorder=3)
    axes.set_ylim(0, 1.45 * max(*gains, *costs, 0.1))
    axes.set_ylabel("last level\ntokens")
    axes.legend(loc="upper right", ncols=4, handlelength=1.0, borderaxespad=0.1, columnspacing=1.2)
    style.quiet(axes)

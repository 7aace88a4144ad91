"""Plots of one generation, round by round: confidence, depth and nodes of every tree, and the prices of `cost_aware`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sage.trees import AUTOREGRESSIVE
from train.report import style

Log = Sequence[Mapping[str, Any]]  # `rounds_log` of a generation
PREFERRED = ("sage", "cost_aware", "eagle2", "ddd", "talon", "spec_llava", "static", "chain")
BAR_WIDTH = 0.84
BELOW_COST, UNUSED, USED = "not expanded: gain below cost", "expanded, no node verified", "expanded"


def draw_generation(report: Mapping[str, Any]) -> Figure | None:
    """Draws the longest generation of `sage`, or else of the most adaptive measured policy; None without any rounds."""
    name = choose_policy(report)
    if name is None:
        return None
    alpha = [(0.9, _alpha)] if any("alpha" in entry for entry in _log(report, name)) else []
    heading, height_in = f"One generation of {name}, round by round", 5.0 if alpha else 3.6
    return _draw(report, name, heading, height_in, [*alpha, (1.15, _planned_depth), (0.9, _nodes_and_width)])


def draw_pricing(report: Mapping[str, Any]) -> Figure | None:
    """Draws the longest generation of the first policy that weighs gain against cost; None if there is none."""
    name = next((name for name in report["policies"] if "price" in next(iter(_log(report, name)), {})), None)
    if name is None:
        return None
    panels = [(0.8, _price), (1.1, _expected_depth), (0.9, _nodes), (1.1, _last_level)]
    return _draw(report, name, f"Expected gain and cost of every tree: {name}", 6.4, panels)


def _draw(
    report: Mapping[str, Any],
    name: str,
    heading: str,
    height_in: float,
    panels: Sequence[tuple[float, Callable[[Axes, Log, str], None]]],
) -> Figure:
    """Draws panels, given as (relative height, function), over the rounds of a policy's generation."""
    log, color = _log(report, name), style.policy_color(name, report["policies"])
    prompt, accepted = report["policies"][name]["example"]["prompt"], sum(entry["accepted"] for entry in log)
    made = style.figure(height_in, heading, f"prompt {prompt}, {len(log)} rounds, {accepted} drafted tokens accepted")
    grid = made.subplots(len(panels), 1, sharex=True, height_ratios=[height for height, _ in panels])
    for axes, (_, draw) in zip(grid, panels, strict=True):
        draw(axes, log, color)
        style.despine(axes)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0.4, len(log) + 0.6)
    made.align_ylabels()
    return made


def choose_policy(report: Mapping[str, Any]) -> str | None:
    """Returns the policy whose trees vary most from round to round, among those with a round log."""
    logged = [name for name in report["policies"] if name != AUTOREGRESSIVE and _log(report, name)]
    known = [name for name in PREFERRED if name in logged]
    return next(iter(known or logged), None)


def _log(report: Mapping[str, Any], name: str) -> Log:
    return report["policies"][name]["example"]["rounds_log"]


def _series(log: Log, key: str) -> tuple[list[int], list[Any]]:
    """Returns the rounds that recorded `key`, counted from 1, and their values."""
    rounds = [number for number, entry in enumerate(log, start=1) if key in entry]
    return rounds, [log[number - 1][key] for number in rounds]


def _bars(axes: Axes, log: Log, *series: tuple[str, str, str]) -> float:
    """Draws (key, color, label) as bars in front of each other, and returns the highest value."""
    for key, color, label in series:
        axes.bar(*_series(log, key), width=BAR_WIDTH, color=color, label=label)
    return float(max(entry[key] for entry in log for key, _, _ in series))


def _marks(axes: Axes, rounds: Sequence[int], values: Sequence[float], label: str) -> None:
    """Draws a short horizontal line over each bar."""
    left, right = [number - BAR_WIDTH / 2 for number in rounds], [number + BAR_WIDTH / 2 for number in rounds]
    axes.hlines(values, left, right, color=style.INK, linewidth=1.4, label=label)


def _legend_above(axes: Axes, highest: float, columns: int) -> None:
    """Draws the legend above bars that end at `highest`, and no tick labels beside it."""
    axes.set_ylim(0, 1.4 * max(highest, 1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= highest])
    axes.legend(loc="upper right", ncols=columns, handlelength=1.0, borderaxespad=0.1, columnspacing=1.2)


def _alpha(axes: Axes, log: Log, color: str) -> None:
    rounds, values = _series(log, "alpha")
    axes.fill_between(rounds, values, color=color, alpha=0.14, linewidth=0)
    axes.plot(rounds, values, color=color, linewidth=1.8, marker="o", markersize=3.2)
    axes.set(ylim=(0, 1.05), ylabel="confidence\nalpha")


def _planned_depth(axes: Axes, log: Log, color: str) -> None:
    highest = _bars(axes, log, ("depth", style.GRID, "levels drafted"), ("accepted", color, "tokens accepted"))
    rounds, planned = _series(log, "planned_depth")
    if planned:
        _marks(axes, rounds, planned, "planned depth")
    axes.set_ylabel("depth")
    _legend_above(axes, max(highest, *planned, 0), columns=3)


def _nodes_and_width(axes: Axes, log: Log, color: str) -> None:
    _bars(axes, log, ("nodes", style.BAND, "nodes verified"))
    axes.set_ylabel("nodes\nverified")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    rounds, widths = _series(log, "width")
    if not widths:
        return
    twin = style.twin_axis(axes)
    twin.plot(rounds, widths, color=color, linewidth=1.8, drawstyle="steps-mid")
    twin.set_ylim(0, 1.15 * max(widths))
    twin.set_ylabel("planned width", color=color)
    twin.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))


def _price(axes: Axes, log: Log, color: str) -> None:
    rounds, prices = _series(log, "price")
    axes.plot(rounds, prices, color=color, linewidth=1.8, marker="o", markersize=3.2)
    axes.set(ylim=(0, 1.2 * max(prices)), ylabel="price of time\ntokens/s")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))


def _expected_depth(axes: Axes, log: Log, color: str) -> None:
    depths = (("levels", style.GRID, "levels drafted"), ("depth", style.BAND, "verified"), ("accepted", color, "accepted"))
    highest = _bars(axes, log, *depths)
    _marks(axes, *_series(log, "expected"), "expected to be accepted")
    axes.set_ylabel("depth")
    _legend_above(axes, highest, columns=4)


def _nodes(axes: Axes, log: Log, color: str) -> None:
    highest = _bars(axes, log, ("drafted", style.GRID, "nodes drafted"), ("nodes", style.BAND, "verified"))
    axes.set_ylabel("nodes")
    _legend_above(axes, highest, columns=2)


def _last_level(axes: Axes, log: Log, color: str) -> None:
    """Draws expected gain and cost of the last level that was considered in each round, by its outcome."""
    (rounds, gains), (_, costs) = _series(log, "gain"), _series(log, "level_cost")
    axes.vlines(rounds, costs, gains, color=style.GRID, linewidth=2.5, zorder=1)
    axes.scatter(rounds, costs, marker="_", s=90, color=style.INK, linewidths=1.8, label="cost", zorder=2)
    outcomes = [
        BELOW_COST if entry["gain"] <= entry["level_cost"] else UNUSED if entry["expanded"] > entry["levels"] else USED
        for entry in log
    ]
    for face, label in (("white", BELOW_COST), (style.BAND, UNUSED), (color, USED)):
        places = [place for place, outcome in enumerate(outcomes) if outcome == label]
        x, y = [place + 1 for place in places], [log[place]["gain"] for place in places]
        axes.scatter(x, y, s=30, c=face, edgecolors=color, linewidths=1.4, label=label, zorder=3)
    axes.set(ylim=(0, 1.6 * max(*gains, *costs, 0.1)), ylabel="gain of the\nlast level\ntokens")
    axes.legend(loc="upper right", ncols=4, handlelength=1.0, borderaxespad=0.1, columnspacing=1.0, fontsize=8.5)

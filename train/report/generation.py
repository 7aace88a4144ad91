"""One generation, round by round: the draft's confidence alpha above, the tree's depth and width beneath."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from train.report import style

PREFERRED = ("sage", "cost_aware", "eagle2", "ddd", "talon", "spec_llava", "static", "chain")


def draw_generation(report: Mapping[str, Any]) -> Figure | None:
    """The longest generation of `sage`, or of the most adaptive policy that was measured; None without any rounds."""
    name = choose_policy(report)
    if name is None:
        return None
    example = report["policies"][name]["example"]
    log = example["rounds_log"]
    has_alpha = any("alpha" in entry for entry in log)
    made = style.figure(
        5.0 if has_alpha else 3.6,
        f"One generation, round by round: {name}",
        f"prompt {example['prompt']}, {len(log)} rounds, {sum(e['accepted'] for e in log)} drafted tokens accepted",
    )
    ratios = [0.9, 1.15, 0.9] if has_alpha else [1.15, 0.9]
    panels = list(made.subplots(len(ratios), 1, sharex=True, height_ratios=ratios))
    if has_alpha:
        _alpha(panels.pop(0), log, style.colour(name, report["policies"]))
    _depth(panels[0], log, style.colour(name, report["policies"]))
    _width(panels[1], log, style.colour(name, report["policies"]))
    panels[1].set_xlabel("round")
    panels[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[1].set_xlim(0.4, len(log) + 0.6)
    made.align_ylabels()
    return made


def choose_policy(report: Mapping[str, Any]) -> str | None:
    """The policy whose trees are most worth showing, among those with a round log."""
    logged = [name for name, part in report["policies"].items() if part["example"]["rounds_log"] and name != "autoregressive"]
    known = [name for name in PREFERRED if name in logged]
    return next(iter(known or logged), None)


def _alpha(axes: Axes, log: list[dict[str, Any]], shade: str) -> None:
    rounds = [index for index, entry in enumerate(log, start=1) if "alpha" in entry]
    values = [entry["alpha"] for entry in log if "alpha" in entry]
    axes.fill_between(rounds, values, color=shade, alpha=0.14, linewidth=0)
    axes.plot(rounds, values, color=shade, linewidth=1.8, marker="o", markersize=3.2)
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("confidence\nalpha")
    style.quiet(axes)


def _depth(axes: Axes, log: list[dict[str, Any]], shade: str) -> None:
    rounds = range(1, len(log) + 1)
    axes.bar(rounds, [entry["depth"] for entry in log], width=0.84, color=style.GRID, label="levels drafted")
    axes.bar(rounds, [entry["accepted"] for entry in log], width=0.84, color=shade, label="tokens accepted")
    planned = [(index, entry["planned_depth"]) for index, entry in enumerate(log, start=1) if "planned_depth" in entry]
    if planned:
        middle = [index for index, _ in planned]
        axes.hlines([depth for _, depth in planned], [m - 0.42 for m in middle], [m + 0.42 for m in middle],
                    color=style.INK, linewidth=1.4, label="planned depth")  # fmt: skip
    axes.set_ylabel("depth")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    deepest = max(max(entry.get("planned_depth", 0), entry["depth"]) for entry in log)
    axes.set_ylim(0, 1.32 * max(deepest, 1))
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= deepest])  # none behind the legend
    axes.legend(loc="upper right", ncols=3, handlelength=1.0, borderaxespad=0.1)
    style.quiet(axes)


def _width(axes: Axes, log: list[dict[str, Any]], shade: str) -> None:
    rounds = list(range(1, len(log) + 1))
    axes.bar(rounds, [entry["nodes"] for entry in log], width=0.84, color=style.BAND)
    axes.set_ylabel("nodes\nverified")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    style.quiet(axes)
    wide = [(index, entry["width"]) for index, entry in enumerate(log, start=1) if "width" in entry]
    if not wide:
        return
    twin = axes.twinx()
    twin.plot([index for index, _ in wide], [width for _, width in wide], color=shade, linewidth=1.8, drawstyle="steps-mid")
    twin.set_ylim(0, 1.15 * max(width for _, width in wide))
    twin.set_ylabel("planned width", color=shade)
    twin.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    twin.tick_params(length=0)
    for side in ("top", "right", "left"):
        twin.spines[side].set_visible(False)

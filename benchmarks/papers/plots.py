"""The two pictures of docs/results.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from benchmarks.papers.tables import TITLES, VLLM_ROWS, fastest_first
from train.report import style

OURS, THEIRS = "#b23a6b", "#9aa5b1"


def draw_vllm(figures: Mapping[str, Any]) -> Figure:
    """Draws tokens per second beside vLLM, a panel per size of the weights, the largest first."""
    figure = style.figure(2.6, "Tokens per second of one request", "pocket Qwen2.5-VL in float32 on two CPU cores, same text")
    panels = {size: figures[size] for size in reversed(list(figures))}
    for axes, (size, part) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        for place, (pair, side) in enumerate(VLLM_ROWS.values()):
            speed = part["decoders"][part["ratios"][pair][side]]["tokens_per_s"]
            axes.barh(place, speed, height=0.62, color=OURS if side == "ours" else THEIRS)
            axes.text(speed, place, f" {speed:.0f}", va="center", fontsize=9)
        axes.set_title(f"{size} MB of weights", fontsize=10, loc="left")
        style.despine(axes, "x")
        axes.set_xticks([])
        axes.margins(x=0.2)
    style.label_bars(figure.axes[0], [name.replace("*", "").replace("`", "") for name in VLLM_ROWS])
    return figure


def draw_headline(figures: Mapping[str, Any]) -> Figure:
    """Draws the speedup by decoder and target with its 95% interval, the fastest on top."""
    decoders = {name: part["decoders"] for name, part in figures.items()}
    names = fastest_first(next(iter(decoders.values())))
    subtitle = "over the autoregressive loop of the same run, with 95% intervals; 20 MB of weights, in the cache"
    figure = style.figure(1.5 + 0.3 * len(names), "Speedup of decoding by decoder", subtitle)
    for axes, (target, found) in zip(figure.subplots(1, len(decoders), sharey=True), decoders.items(), strict=True):
        for place, name in enumerate(names):
            value = found[name]["speedup"]
            low, high = found[name].get("speedup_ci") or (value, value)
            axes.barh(place, value, height=0.62, color=style.policy_color(name))
            axes.plot([low, high], [place, place], color=style.INK, linewidth=1.2)
            axes.text(max(high, value), place, f" {value:.2f}x", va="center", fontsize=9)
        axes.set_title(TITLES[target], fontsize=10.5, loc="left")
        axes.axvline(1.0, **style.BASELINE)
        axes.margins(x=0.2)
        style.despine(axes, "x")
    style.label_bars(figure.axes[0], names)
    return figure


PLOTS = {"vllm.png": ("vllm", draw_vllm), "headline.png": ("headline", draw_headline)}

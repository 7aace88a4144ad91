"""Section: engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.figure import Figure

from benchmarks.papers.figures import Json
from benchmarks.papers.page.markdown import Expectation, Figures, by_target, join, times_with_interval, title_of
from sage.io.tables import markdown_table

GOALS = {"autoregressive": 1.0, "same draft": 1.2, "any draft": 1.4}  # of the ratios
CLAIMS = {
    "autoregressive": "our autoregressive loop at least level with vLLM's",
    "same draft": "our fastest policy at least 1.2 times vLLM's fastest setting with the same draft",
    "any draft": "our fastest policy with any draft at least 1.4 times vLLM's fastest setting",
}


def values(figures: Figures) -> dict[str, Any]:
    """Returns the placeholders of engines.md."""
    tables = by_target(figures, "engines")
    first = next(iter(tables.values()))
    parts = [f"### {title_of(target)}\n\n{_decoders(part)}\n\n{_ratios(part)}" for target, part in tables.items()]
    engine = first["engine"]
    return {
        "vllm": engine["vllm"],
        "torch": engine["torch"],
        "prompts": first["prompts"],
        "repeats": first["repeats"],
        "threads": first["threads"],
        "passes": first["passes"],
        "targets": join(*parts),
    }


def expectations(figures: Figures) -> list[Expectation]:
    """Speed against the fastest engine that runs on this machine."""
    return [
        Expectation(f"{title_of(target)}: {CLAIMS[name]}", one["ratio"] >= GOALS[name], _evidence(one))
        for target, part in by_target(figures, "engines").items()
        for name, one in part["ratios"].items()
    ]


def _evidence(one: Mapping[str, Any]) -> str:
    return f"`{one['ours']}` / `{one['theirs']}`: {times_with_interval(one['ratio'], one['range'])}"


def _decoders(part: Json) -> str:
    rows = [
        [
            one["side"],
            f"`{label}`",
            f"{one['tokens_per_target_pass']:.2f}" if one["draft"] else "",
            f"{one['tokens_per_s']:.0f}",
            "-".join(f"{bound:.0f}" for bound in one["range"]),
            f"{one['end_to_end_tokens_per_s']:.0f}",
            f"{one['match']}/{one['total']}",
        ]
        for label, one in part["decoders"].items()
    ]
    return markdown_table(["side", "decoder", "tokens/pass", "tokens/s", "range", "end to end", "identical"], rows, "<<>")


def _ratios(part: Json) -> str:
    rows = [
        [name, f"`{one['ours']}`", f"`{one['theirs']}`", times_with_interval(one["ratio"], one["range"])]
        for name, one in part["ratios"].items()
    ]
    return markdown_table(["", "our fastest", "vLLM's fastest", "ours / vLLM's"], rows, "<<<>")


PLOTS: Mapping[str, Callable[[Figures], Figure]] = {}

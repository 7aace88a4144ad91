"""The headline tables: decoders that a user can choose from, in the README; every policy on every target, also on the page."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from benchmarks.papers.figures import Json
from benchmarks.papers.page.markdown import Figures, by_target, cells, title_of
from sage.bench.runners import AUTOREGRESSIVE, HF_COMPILED, HF_GENERATE
from sage.io.tables import markdown_table

CAPTIONS = "caption"
OURS = "cost_aware"


def headline_table(figures: Figures) -> str:
    """Returns the table; empty before the policies are measured."""
    tables = by_target(figures, "policies")
    if not tables:
        return ""
    columns = [cell for target in tables for cell in (f"{title_of(target)}: captions", "all families", "tokens/pass")]
    return markdown_table(["decoder", *columns, "identical"], [_row(name, tables) for name in decoders(tables)])


def engines_table(figures: Figures) -> str:
    """Returns the decoders that a user can choose from, slowest first, by tokens per second; empty before they are measured."""
    tables = by_target(figures, "engines")
    if not tables:
        return ""
    target, part = next(iter(tables.items()))
    ordered = sorted(choices(part), key=lambda choice: float(choice[1]["tokens_per_s"]))
    rows = [[text, *(f"{one[key]:.0f}" for key in ("tokens_per_s", "end_to_end_tokens_per_s"))] for text, one in ordered]
    return markdown_table([f"{title_of(target)}, one request at a time", "tokens/s", "end to end"], rows)


def choices(part: Mapping[str, Any]) -> list[tuple[str, Json]]:
    """Returns what a user can run, in words, and its figures: other libraries, and our fastest decoder with each draft."""
    ratios, vllm = part["ratios"], f"vLLM {part['engine']['vllm']}"
    speculative = ratios["same draft"]["theirs"]
    words = {
        HF_GENERATE: "Hugging Face `generate`",
        HF_COMPILED: "Hugging Face `generate`, compiled",
        ratios["autoregressive"]["theirs"]: vllm,
        speculative: f"{vllm} with our `{part['decoders'][speculative]['draft']}`",
        AUTOREGRESSIVE: "**sage-draft** without a draft",
    }
    for name in ("same draft", "any draft"):
        label = ratios[name]["ours"]
        policy, draft = label.split(", ")
        words[label] = f"**sage-draft**: `{policy}` with `{draft}`"
    return [(text, part["decoders"][label]) for label, text in words.items() if label in part["decoders"]]


def tuned_policies(figures: Mapping[str, Any]) -> list[str]:
    """Returns the names of the tuned policies, in the order of the figures."""
    return [label for label, variant in figures["variants"].items() if label == variant["policy"]]


def decoders(tables: Mapping[str, Json]) -> list[str]:
    """Returns the names of all baselines and tuned policies."""
    parts = [names for figures in tables.values() for names in (figures["baselines"], tuned_policies(figures))]
    return list(dict.fromkeys(name for names in parts for name in names))


def _row(name: str, tables: Mapping[str, Json]) -> list[str]:
    parts = [part_of(figures, name) for figures in tables.values()]
    captions = [part_of(figures["by_family"].get(CAPTIONS, {}), name) for figures in tables.values()]
    columns = [(*cells(a, "speedup"), *cells(b, "speedup", "tokens/pass")) for a, b in zip(captions, parts, strict=True)]
    mark = "**" if name == OURS else ""
    marked = [f"{mark}{cell}{mark}" if cell else "" for cell in (f"`{name}`", *chain(*columns))]
    same, total = (sum(part.get(key, 0) for part in parts) for key in ("match", "total"))
    return [*marked, f"{same}/{total}" if total else ""]


def part_of(figures: Mapping[str, Any], name: str) -> Json:
    """Returns the figures of a policy or baseline; empty if it was not measured."""
    part: Json = {**figures.get("baselines", {}), **figures.get("policies", {})}.get(name, {})
    return part

"""The headline table: every decoder on both targets, shown on the page and in the README."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.papers.figures import Json
from benchmarks.papers.page.markdown import Figures, by_target, times, title_of
from sage.bench.tables import markdown_table

CAPTIONS = "caption"
OURS = "cost_aware"


def headline_table(figures: Figures) -> str:
    """Returns the table; empty before the policies are measured."""
    tables = by_target(figures, "policies")
    if not tables:
        return ""
    columns = [cell for target in tables for cell in (f"{title_of(target)}: captions", "all families", "tokens/pass")]
    return markdown_table(["decoder", *columns, "identical"], [_row(name, tables) for name in decoders(tables)])


def tuned_policies(figures: Mapping[str, Any]) -> list[str]:
    """Returns the names of the tuned policies, in the order of the figures."""
    return [label for label, variant in figures["variants"].items() if label == variant["policy"]]


def decoders(tables: Mapping[str, Json]) -> list[str]:
    """Returns the names of all baselines and tuned policies."""
    parts = [names for figures in tables.values() for names in (figures["baselines"], tuned_policies(figures))]
    return list(dict.fromkeys(name for names in parts for name in names))


def _row(name: str, tables: Mapping[str, Json]) -> list[str]:
    cells, same, total = [], 0, 0
    for figures in tables.values():
        part = part_of(figures, name)
        captions = part_of(figures["by_family"].get(CAPTIONS, {}), name)
        tokens = part.get("tokens_per_target_pass") if part else None
        cells += [_times(captions), _times(part), f"{tokens:.2f}" if tokens else ""]
        same, total = same + (part or {}).get("match", 0), total + (part or {}).get("total", 0)
    identical = f"{same}/{total}" if total else ""
    if name == OURS:
        return [f"**`{name}`**", *(f"**{cell}**" if cell else "" for cell in cells), identical]
    return [f"`{name}`", *cells, identical]


def _times(part: Json | None) -> str:
    return times(part["speedup"]) if part else ""


def part_of(figures: Mapping[str, Any], name: str) -> Json | None:
    """Returns the figures of a policy or baseline; None if it was not measured."""
    for kind in ("policies", "baselines"):
        if name in figures.get(kind, {}):
            part: Json = figures[kind][name]
            return part
    return None

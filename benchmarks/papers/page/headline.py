"""The headline table: every decoder on both targets, shown on the page and in the README."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from benchmarks.papers.figures import Json
from benchmarks.papers.page.markdown import Figures, by_target, cells, title_of
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

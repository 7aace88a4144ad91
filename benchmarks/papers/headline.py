"""The headline table: every decoder on every target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.papers.figures import Json
from benchmarks.papers.markdown import fill
from benchmarks.papers.study import OURS, Figures, by_target

CAPTIONS = "caption"


def headline_table(figures: Figures) -> str:
    """Returns the table; empty before the policies are measured."""
    tables = by_target(figures, "policies")
    rows = []
    for name in decoders(tables):
        overall = [part_of(one, name) for one in tables.values()]
        captions = [part_of(one["by_family"].get(CAPTIONS, {}), name) for one in tables.values()]
        parts = [{"captions": first, "overall": second} for first, second in zip(captions, overall, strict=True)]
        same, total = (sum(part.get(key, 0) for part in overall) for key in ("match", "total"))
        identical = f"{same}/{total}" if total else ""
        rows.append({"name": name, "mark": "**" if name == OURS else "", "parts": parts, "identical": identical})
    return fill("headline_table", {"targets": tables, "rows": rows}) if tables else ""


def tuned_policies(figures: Json) -> list[str]:
    """Returns the names of the tuned policies, in the order of the figures."""
    return [label for label, variant in figures["variants"].items() if label == variant["policy"]]


def decoders(tables: Mapping[str, Json]) -> list[str]:
    """Returns the names of all baselines and tuned policies."""
    parts = [names for figures in tables.values() for names in (figures["baselines"], tuned_policies(figures))]
    return list(dict.fromkeys(name for names in parts for name in names))


def part_of(figures: Mapping[str, Any], name: str) -> Json:
    """Returns the figures of a policy or baseline; empty if it was not measured."""
    part: Json = {**figures.get("baselines", {}), **figures.get("policies", {})}.get(name, {})
    return part

"""Markdown of the page: templates, table cells, titles and the list of expectations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from benchmarks.papers.figures import Json
from sage.io.tables import markdown_table

Figures = Mapping[str, Json]  # figures by name, without provenance
TARGET_TITLES = {"qwen": "pocket Qwen2.5-VL", "qwen3": "pocket Qwen3-VL", "llava": "pocket LLaVA-OneVision"}
CELLS = {  # format of the cells of a column, by its title
    "tokens/pass": "{tokens_per_target_pass:.2f}",
    "accepted": "{mean_accepted_draft:.2f}",
    "tokens/s": "{tokens_per_s:.0f}",
    "speedup": "{speedup:.2f}x",
    "95%": "{interval}",
    "nodes": "{nodes_per_round:.1f}",
    "levels": "{draft_steps_per_round:.2f}",
    "identical": "{match}/{total}",
    "draft context": "{draft_context:.0f}",
    "draft prefill": "{draft_prefill_ms:.1f} ms",
}


@dataclass(frozen=True)
class Expectation:
    """What is expected and by whom; whether the figures confirm it; the figures that decide it, and the cause if unmet."""

    claim: str
    is_met: bool
    evidence: str


def expectations_section(expectations: Sequence[Expectation]) -> str:
    """Returns the section that lists all expectations, unmet ones first; empty without any."""
    if not expectations:
        return ""
    ordered = sorted(expectations, key=lambda one: one.is_met)
    rows = [[one.claim, "yes" if one.is_met else "**no**", one.evidence] for one in ordered]
    table = markdown_table(["expectation", "met", "measured"], rows, "<")
    return fill("expectations", num_met=sum(one.is_met for one in ordered), num_total=len(ordered), table=table)


def fill(template: str, **values: Any) -> str:
    """Returns the template `TEMPLATE.md` of this folder with its placeholders replaced; empty paragraphs are removed."""
    text = Path(__file__).with_name(f"{template}.md").read_text(encoding="utf-8")
    return re.sub(r"\n{3,}", "\n\n", Template(text).substitute(values)).strip()


def join(*parts: str) -> str:
    """Joins Markdown blocks with an empty line; empty blocks are left out."""
    return "\n\n".join(part for part in parts if part)


def title_of(target: str) -> str:
    """Returns the title of a target."""
    return TARGET_TITLES.get(target, target)


def by_target(figures: Figures, prefix: str) -> dict[str, Json]:
    """Returns the figures `PREFIX_TARGET` by target, known targets first."""
    parts = {name.removeprefix(f"{prefix}_"): part for name, part in figures.items() if name.startswith(f"{prefix}_")}
    known = list(TARGET_TITLES)
    return dict(sorted(parts.items(), key=lambda item: (known.index(item[0]) if item[0] in known else len(known), item[0])))


def grouped(rows: Sequence[Json], key: str) -> dict[str, list[Json]]:
    """Returns the rows by their value of `key`, in the order of first appearance."""
    return {value: [row for row in rows if row[key] == value] for value in dict.fromkeys(row[key] for row in rows)}


def cells(row: Mapping[str, Any], *columns: str) -> list[str]:
    """Returns the cells of some columns of `CELLS`; a cell is empty if the row has no such figure."""
    figures = {**row, "interval": interval(row.get("speedup_ci"))}

    def cell(column: str) -> str:
        try:
            return CELLS[column].format_map(figures)
        except KeyError:
            return ""

    return [cell(column) for column in columns]


def by_policy(points: Sequence[Mapping[str, Json]]) -> tuple[list[str], list[list[str]]]:
    """Returns head and rows of a table of tokens per pass and speedup: a row per point, columns by policy."""
    columns, names = ("tokens/pass", "speedup"), list(points[0])
    head = [f"`{name}` {column}" for column in columns for name in names]
    return head, [[cell for column in columns for name in names for cell in cells(point[name], column)] for point in points]


def listing(words: Sequence[str]) -> str:
    """Returns `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def times(value: float) -> str:
    """Returns `2.31x`."""
    return f"{value:.2f}x"


def interval(bounds: Sequence[float] | None) -> str:
    """Returns `1.94-2.31`; empty without an interval."""
    return "" if not bounds or bounds[0] == bounds[1] else f"{bounds[0]:.2f}-{bounds[1]:.2f}"


def times_with_interval(value: float, bounds: Sequence[float] | None) -> str:
    """Returns `2.31x (1.94-2.68)`; no brackets without an interval."""
    text = interval(bounds)
    return f"{times(value)} ({text})" if text else times(value)


def options_text(options: Mapping[str, Any]) -> str:
    """Returns `depth 8, top_k 2`; the paths of a static tree by their number."""
    return ", ".join(f"{key} {f'{len(value)} nodes' if key == 'paths' else value}" for key, value in options.items())

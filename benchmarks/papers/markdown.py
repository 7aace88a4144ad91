"""Markdown of the page: templates, and text of single figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from benchmarks.papers.figures import Json

TEMPLATES = Path(__file__).with_name("page")
EACH = re.compile(r"<!-- each ([\w\[\]]+) -->(\n?)(.*?)<!-- end \1 -->\2", re.DOTALL)


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Returns `TEMPLATE.md` with its placeholders replaced; empty paragraphs are removed.

    Placeholders are those of `str.format`; beside Python's formats, `x` writes 2.31x and `interval` 1.94-2.31; a format in
    brackets adds a blank and brackets. A placeholder with a format is empty where its figure is missing. What stands between
    `<!-- each KEY -->` and `<!-- end KEY -->`, such as the row of a table or a cell of a row, is repeated for every element of
    the list or mapping `KEY`; `name` is the key of an element, `value` an element that has no keys of its own.
    """
    text = (TEMPLATES / f"{template}.md").read_text(encoding="utf-8")
    return re.sub(r"\n{3,}", "\n\n", _filled(text, values)).strip()


def _filled(text: str, values: Mapping[str, Any]) -> str:
    first, *pieces = EACH.split(text)
    filled = _Figures().vformat(first, (), values)
    for key, _, block, rest in zip(*(pieces[place::4] for place in range(4)), strict=True):
        parts = _Figures().get_field(key, (), values)[0]
        for name, part in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
            own = part if isinstance(part, Mapping) else {}
            filled += _filled(block, {**values, "name": name, "value": part, **own})
        filled += _Figures().vformat(rest, (), values)
    return filled


class _Missing(str):
    """Name of a placeholder without a figure."""


class _Figures(Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except KeyError:
            return _Missing(field_name), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, _Missing) and not format_spec:
            raise ValueError(f"{{{value}}}: a placeholder without a value")
        if value is None or isinstance(value, _Missing):
            return ""
        if format_spec.startswith("("):
            text = self.format_field(value, format_spec[1:-1])
            return f" ({text})" if text else ""
        if format_spec == "interval":
            return interval(value)
        return times(value) if format_spec == "x" else format(value, format_spec)


def grouped(rows: Iterable[Json], key: str) -> dict[str, list[Json]]:
    """Returns the rows by their value of `key`, in the order of first appearance."""
    groups: dict[str, list[Json]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


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

"""Markdown of the page: templates, and text of single figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Undefined, UndefinedError

from benchmarks.papers.figures import Json

TEMPLATES = Path(__file__).with_name("page")


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Returns the Jinja template `TEMPLATE.md`, filled with the values; empty paragraphs are removed.

    The filter `f` formats a figure (see `formatted`), `options` the options of a policy (see `options_text`). A placeholder
    with `f` is empty where its figure is missing. Raises ValueError for another placeholder without a value.
    """
    try:
        text = _pages().get_template(f"{template}.md").render(values)
    except UndefinedError as error:
        name = re.findall(r"'([^']*)'", str(error))[-1]
        raise ValueError(f"{{{name}}}: a placeholder without a value") from error
    return re.sub(r"\n{3,}", "\n\n", text).strip()


@cache
def _pages() -> Environment:
    pages = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True)
    pages.filters |= {"f": formatted, "options": options_text}
    return pages


def formatted(value: Any, spec: str) -> str:
    """Formats a figure; empty if it is None or missing.

    Args:
        spec: of Python, `x` for 2.31x, or `interval` for 1.94-2.31; in brackets, it adds a blank and brackets.
    """
    if value is None or isinstance(value, Undefined):
        return ""
    if spec.startswith("("):
        text = formatted(value, spec[1:-1])
        return f" ({text})" if text else ""
    if spec == "interval":
        return interval(value)
    return times(value) if spec == "x" else format(value, spec)


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

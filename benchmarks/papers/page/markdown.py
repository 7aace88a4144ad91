"""Markdown of the page: templates, cells and titles."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from benchmarks.papers.figures import Json

Figures = Mapping[str, Json]  # figures by name, without provenance
TARGET_TITLES = {"qwen": "pocket Qwen2.5-VL", "llava": "pocket LLaVA-OneVision"}


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


def listing(words: Sequence[str]) -> str:
    """Returns `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else list(words))


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

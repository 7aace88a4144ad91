"""The record of a study: how it is measured, and what its section of docs/results.md shows. Prose is in page/NAME.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab

Figures = Mapping[str, Json]  # figures by file name, without provenance
OURS = "cost_aware"
PUBLISHED = "{} (published)"  # label of a policy with the settings of its paper
TARGET_TITLES = {"qwen": "pocket Qwen2.5-VL", "qwen3": "pocket Qwen3-VL", "llava": "pocket LLaVA-OneVision"}


@dataclass(frozen=True)
class Expectation:
    """What is expected and by whom; whether the figures confirm it; the figures that decide it, and the cause if unmet."""

    claim: str
    is_met: bool
    evidence: str


@dataclass(frozen=True, kw_only=True)
class Study:
    """One study.

    `values`, `expectations` and `plots` receive the study's figures: the content of NAME.json; with `is_per_target`, that of
    each NAME_TARGET.json by title of the target; with `files`, the content of each of them by name.

    Attributes:
        name: of the study, its template and its sizes in full.yaml.
        measure: measures its figures where they are missing or outdated.
        expectations: claims of the papers and goals of this project.
        values: returns the placeholders of the template that are not themselves figures.
        plots: draw a file each.
        files: names of the figures, if there are several.
        beside: prefix of other figures per target, added to those of each target under this key.
    """

    name: str
    measure: Callable[[Lab], object]
    expectations: Callable[[Any], Iterable[Expectation]]
    values: Callable[[Any], Mapping[str, Any]] = lambda figures: {}
    plots: Mapping[str, Callable[[Any], Figure]] = field(default_factory=dict)
    is_per_target: bool = False
    beside: str = ""
    files: tuple[str, ...] = ()

    def file_names(self, names: Iterable[str]) -> list[str]:
        """Returns those of `names` that belong to the study; none unless all its figures exist."""
        prefixes = self.files or (self.name,)
        owned = [name for name in names if name.startswith(prefixes)]
        return owned if all(any(name.startswith(prefix) for name in owned) for prefix in prefixes) else []

    def select(self, figures: Figures) -> Any:
        """Returns the study's figures, as its functions receive them, with the titles of targets in place of short names."""
        if self.is_per_target:
            others = by_target(figures, self.beside) if self.beside else {}
            return {
                title: {**part, self.beside: others.get(title, {})} for title, part in by_target(figures, self.name).items()
            }
        return titled({name: figures[name] for name in self.files} if self.files else figures[self.name])


def by_target(figures: Figures, prefix: str) -> dict[str, Any]:
    """Returns the figures `PREFIX_TARGET` by title of the target, known targets first."""
    known = [f"{prefix}_{target}" for target in TARGET_TITLES]
    ordered = dict.fromkeys([*known, *sorted(name for name in figures if name.startswith(f"{prefix}_"))])
    return titled({name.removeprefix(f"{prefix}_"): figures[name] for name in ordered if name in figures})


def titled(value: Any) -> Any:
    """Returns figures with titles of targets in place of their short names, as keys and as values of `target`."""
    if isinstance(value, list):
        return [titled(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    titles = {key: TARGET_TITLES.get(part, part) if key == "target" else titled(part) for key, part in value.items()}
    return {TARGET_TITLES.get(key, key): part for key, part in titles.items()}

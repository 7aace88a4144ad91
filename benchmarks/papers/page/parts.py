"""What the page is made of: sections, their pictures, and expectations that the figures confirm or contradict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from benchmarks.papers.figures import Json

Found = Mapping[str, Json]  # figures by name, without their provenance
TARGETS = {"qwen": "pocket Qwen2.5-VL", "llava": "pocket LLaVA-OneVision"}


@dataclass(frozen=True)
class Finding:
    """One expectation of a paper or of ours, and what came out.

    Attributes:
        claim: what was expected, and by whom.
        holds: whether the figures bear it out.
        said: the figures that decide it, and, where it does not hold, the cause that they point to.
    """

    claim: str
    holds: bool
    said: str


@dataclass(frozen=True)
class Picture:
    """One PNG beside the page; `draw` answers None where its figures are missing."""

    file: str
    caption: str
    draw: Callable[[Found], Figure | None]


@dataclass(frozen=True)
class Section:
    """One section of the page.

    Attributes:
        item: of the command line.
        prefixes: of the figures it is about; without any of them it is left out.
        body: its tables and sentences, Markdown.
        findings: its part of the list of expectations.
        pictures: shown between title and body.
    """

    item: str
    title: str
    prefixes: tuple[str, ...]
    body: Callable[[Found], str]
    findings: Callable[[Found], list[Finding]]
    pictures: tuple[Picture, ...] = ()

    def names(self, found: Found) -> list[str]:
        """Its figures, as far as they are there."""
        return [name for name in found if name.startswith(self.prefixes)]


def of_targets(found: Found, prefix: str) -> dict[str, Json]:
    """Figures `PREFIX_TARGET` by target, known targets first."""
    names = {name.removeprefix(f"{prefix}_"): figures for name, figures in found.items() if name.startswith(f"{prefix}_")}
    return dict(sorted(names.items(), key=lambda item: (list(TARGETS).index(item[0]) if item[0] in TARGETS else 99, item[0])))


def title_of(target: str) -> str:
    """How a target is called on the page."""
    return TARGETS.get(target, target)


def paragraphs(*parts: str) -> str:
    """Markdown blocks with an empty line between them; empty ones are left out."""
    return "\n\n".join(part for part in parts if part)


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else list(words))

"""What `sage-export --inspect` says of a folder, as data and as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"
FIGURES = {"tokens_per_target_pass": "tokens/pass", "mean_accepted_draft": "accepted", "speedup": "speedup"}


@dataclass
class Description:
    """What a folder is.

    Attributes:
        kind: run, state, draft, export, foreign draft, target or unknown.
        facts: label -> value, in the order they are told; empty values are left out.
        problems: what is damaged or missing.
        table: the last validation, a row per policy.
    """

    folder: Path
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    table: dict[str, Any] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is damaged or missing."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "folder": str(self.folder), "is_whole": self.is_whole}

    def text(self) -> str:
        """A few lines for a terminal."""
        state = "" if self.kind == UNKNOWN else ", whole" if self.is_whole else ", DAMAGED"
        told = {label: _told(value) for label, value in self.facts.items() if value not in (None, "", [], {})}
        width = max(map(len, told), default=0)
        lines = [f"{self.folder}: {self.kind}{state}"]
        lines += [f"  {label:{width}}  {value}" for label, value in told.items()]
        lines += [f"  problem: {problem}" for problem in self.problems]
        return "\n".join([*lines, *self._table()])

    def _table(self) -> Iterator[str]:
        if not self.table:
            return
        width = max(map(len, self.table))
        yield f"  {'validation':{width}}" + "".join(f"{label:>13}" for label in FIGURES.values()) + f"{'identical':>13}"
        for name, part in self.table.items():
            figures = "".join(f"{part[key]:>13.2f}" if key in part else f"{'-':>13}" for key in FIGURES)
            yield f"  {name:{width}}{figures}{part.get('match', '?')!s:>9}/{part.get('total', '?')!s:<3}".rstrip()


def _told(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)

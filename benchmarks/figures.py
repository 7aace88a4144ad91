"""Tables of figures, printed and written as JSON for `benchmarks.gpu_page`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sage.io.files import write_json
from sage.io.tables import text_table


@dataclass(frozen=True)
class Figures:
    """A table as printed: a line above it, its cells, lines of notes below it, and the machine."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    machine: str

    def text(self) -> str:
        """Returns the lines of a terminal. Columns are aligned on the right if their first cell is a number."""
        cells = self.rows[0] if self.rows else self.head
        align = "".join(">" if cell[:1].isdigit() else "<" for cell in cells)
        return "\n".join((self.title, text_table(self.head, self.rows, align, ruled=False), *self.notes, self.machine))

    def write(self, path: str | Path | None) -> None:
        """Writes the table with the command of this process as JSON; nothing without a path."""
        if path is not None:
            write_json(Path(path), {"command": command(), **asdict(self)})

    @classmethod
    def of(cls, content: dict[str, Any]) -> Figures:
        """Returns the table of a file that `write` has written."""
        return cls(**{key: value for key, value in content.items() if key != "command"})


def command() -> str:
    """Returns the arguments of this process, as one types them."""
    spec: Any = sys.modules["__main__"].__spec__
    name = sys.argv[0] if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"
    return " ".join((name, *map(shlex.quote, sys.argv[1:])))


def fill_blocks(text: str, kind: str, content: Callable[[str], str | None]) -> str:
    """Returns a page whose blocks `<!-- KIND: NAME -->` to `<!-- end -->` hold `content(NAME)`; unchanged where it is None."""

    def filled(found: re.Match[str]) -> str:
        new = content(found[2])
        return found[0] if new is None else f"{found[1]}\n{new}\n{found[3]}"

    return re.sub(rf"(<!-- {kind}: ([\w ]+) -->\n).*?(\n<!-- end -->)", filled, text, flags=re.DOTALL)


def counts(text: str) -> list[int]:
    """Parses a list of positive integers; raises ValueError for another format."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise ValueError(f"{text!r}: not a list of counts; give positive integers separated by commas")
    return found

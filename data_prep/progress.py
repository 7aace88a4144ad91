"""A line on the terminal that counts while something takes its time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
SILENT_S = 1.0  # what is done sooner needs no line
EVERY_S = 0.2


class Progress:
    """Counts on one line of stderr; silent where that is no terminal, and at first."""

    def __init__(self, what: str) -> None:
        self.what, self.begin, self.shown = what, time.monotonic(), 0.0

    def __call__(self, done: int, total: int | None) -> None:
        """`done` of `total` (None: nobody knows how many there will be)."""
        now = time.monotonic()
        if sys.stderr.isatty() and now - self.begin > SILENT_S and (done == total or now - self.shown > EVERY_S):
            self.shown = now
            left = f"/{total}, {(now - self.begin) / done * (total - done):.0f} s left" if total else ""
            print(f"\r{self.what} {done}{left} ", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leaves the line, if there is one."""
        if self.shown:
            print(file=sys.stderr)
            self.shown = 0.0


def with_progress(items: Iterable[Item], total: int | None, what: str) -> Iterator[Item]:
    """The items, counted as they pass."""
    progress = Progress(what)
    try:
        for done, item in enumerate(items, 1):
            yield item
            progress(done, total)
    finally:
        progress.end()

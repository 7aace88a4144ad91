"""What a person sees while a run goes on: one live line in a terminal, a log line every few seconds anywhere else.

Owns: the look of it. Does not own: the numbers. Rank 0 alone speaks.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)


class Display(Protocol):
    """Shows the latest numbers of a run."""

    def update(self, step: int, facts: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Silent:
    """For ranks other than 0."""

    def update(self, step: int, facts: dict[str, float]) -> None:
        return None

    def close(self) -> None:
        return None


class Live:
    """A bar with loss, estimated acceptance, tokens/s, memory and the time left."""

    def __init__(self, total: int, first: int, console: Console | None = None) -> None:
        self.bar = Progress(
            BarColumn(bar_width=12),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console or Console(stderr=True),
        )
        self.task = self.bar.add_task("training", total=total, completed=first, facts="")
        self.bar.start()

    def update(self, step: int, facts: dict[str, float]) -> None:
        self.bar.update(self.task, completed=step, facts=describe(facts))

    def close(self) -> None:
        self.bar.stop()


class Lines:
    """A log line at most every `interval_s` seconds, with an estimate of the time left."""

    def __init__(self, total: int, first: int, interval_s: float) -> None:
        self.total, self.first, self.interval_s = total, first, interval_s
        self.start = self.last = time.monotonic()

    def update(self, step: int, facts: dict[str, float]) -> None:
        now = time.monotonic()
        if now - self.last < self.interval_s and step < self.total:
            return
        self.last = now
        left_s = (now - self.start) / max(1, step - self.first) * (self.total - step)
        logger.info("step %d/%d  %s  %s left", step, self.total, describe(facts), clock(left_s))

    def close(self) -> None:
        return None


def open_display(total: int, first: int, interval_s: float, is_main: bool) -> Display:
    """The display that fits where stderr goes."""
    if not is_main:
        return Silent()
    return Live(total, first) if sys.stderr.isatty() else Lines(total, first, interval_s)


PARTS = (  # metric, how it is shown
    ("loss", "loss {:.4f}"),
    ("agreement", "agree {:.3f}"),
    ("estimated_tokens_per_pass", "~{:.2f} tokens/pass"),
    ("tokens_per_s", "{:,.0f} tokens/s"),
    ("memory_gib", "{:.1f} GiB"),
)


def describe(facts: dict[str, float]) -> str:
    """`loss 0.4120  agree 0.870  ~3.41 tokens/pass  12,345 tokens/s  21.3 GiB`, of the facts that are there."""
    return "  ".join(form.format(facts[name]) for name, form in PARTS if name in facts)


def clock(seconds: float) -> str:
    """`1:02:03` or `02:03`."""
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes:02d}:{whole:02d}"

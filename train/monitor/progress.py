"""Progress of a run: a live line in a terminal, log lines at intervals elsewhere; on rank 0 only."""

from __future__ import annotations

import logging
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from tqdm import tqdm

logger = logging.getLogger(__name__)
BAR_WIDTH, NUM_GAPS = 12, 4  # columns of the bar; blanks between the five parts of the live line
LONGEST_TIME = "0:00:00"
ESTIMATE_S = 900.0  # the time left follows from the steps of this period, which has to contain two


class Display:
    """Shows the latest metrics of a run; the base class shows nothing, on ranks other than 0."""

    def update(self, step: int, metrics: dict[str, float]) -> None:
        return None

    def close(self) -> None:
        return None


class LiveDisplay(Display):
    """A progress bar with loss, estimated acceptance, tokens/s, memory and the time left.

    One line: in a narrow terminal the last metrics are left out, never the steps or the time left.
    """

    def __init__(self, total: int, first: int, console: Console | None = None) -> None:
        self.bar = Progress(
            BarColumn(bar_width=BAR_WIDTH),
            TextColumn("{task.completed}/{task.total}", table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[metrics]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            TextColumn("left", table_column=Column(no_wrap=True)),
            console=console or Console(stderr=True),
            speed_estimate_period=ESTIMATE_S,
        )
        self.total = total
        self.task = self.bar.add_task("training", total=total, completed=first, metrics="")
        self.bar.start()

    def update(self, step: int, metrics: dict[str, float]) -> None:
        taken = BAR_WIDTH + 2 * len(str(self.total)) + len(f"/{LONGEST_TIME}left") + NUM_GAPS
        self.bar.update(self.task, completed=step, metrics=describe(metrics, self.bar.console.width - taken))

    def close(self) -> None:
        self.bar.stop()


class LogDisplay(Display):
    """Logs a line at most every `interval_s` seconds, with the estimated remaining time."""

    def __init__(self, total: int, first: int, interval_s: float) -> None:
        self.total, self.first, self.interval_s = total, first, interval_s
        self.start = self.last = time.monotonic()

    def update(self, step: int, metrics: dict[str, float]) -> None:
        now = time.monotonic()
        if now - self.last < self.interval_s and step < self.total:
            return
        self.last = now
        left_s = (now - self.start) / max(1, step - self.first) * (self.total - step)
        logger.info("step %d/%d  %s  %s left", step, self.total, describe(metrics), tqdm.format_interval(left_s))


def open_display(total: int, first: int, interval_s: float, is_main: bool) -> Display:
    """Returns a live display if stderr is a terminal, else a logging one."""
    if not is_main:
        return Display()
    return LiveDisplay(total, first) if sys.stderr.isatty() else LogDisplay(total, first, interval_s)


PARTS = (  # metric, format
    ("loss", "loss {:.4f}"),
    ("agreement", "agree {:.3f}"),
    ("estimated_tokens_per_pass", "~{:.2f} tokens/pass"),
    ("tokens_per_s", "{:,.0f} tokens/s"),
    ("memory_gib", "{:.1f} GiB"),
)


def describe(metrics: dict[str, float], width: int | None = None) -> str:
    """Returns `loss 0.4120  agree 0.870  ~3.41 tokens/pass  12,345 tokens/s  21.3 GiB`, of the metrics that are present.

    Args:
        width: only the first ones that fit into so many characters; None: all.
    """
    parts = [form.format(metrics[name]) for name, form in PARTS if name in metrics]
    while width is not None and parts and len("  ".join(parts)) > width:
        parts.pop()
    return "  ".join(parts)

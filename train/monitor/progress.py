"""Progress of a run and of a validation: a live line in a terminal, log lines at intervals elsewhere; on rank 0 only."""

from __future__ import annotations

import logging
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from tqdm import tqdm

logger = logging.getLogger(__name__)
BAR_WIDTH = 12
PROMPT = "prompt"
ESTIMATE_S = 900.0  # the time left follows from the steps of this period, which has to contain two


class Display:
    """Shows the latest metrics of a run and the progress of validations; the base class shows nothing (ranks other than 0)."""

    def update(self, step: int, total: float, metrics: dict[str, float]) -> None:
        """Shows that `step` steps are taken of `total`, which is an estimate for a run with a time limit."""

    def show_validation(self, done: int, total: int, figures: str) -> None:
        """Shows that `done` of `total` prompts are decoded, counted once per repeat, and the figures so far."""

    def close(self) -> None: ...


class LiveDisplay(Display):
    """A progress bar with loss, estimated acceptance, tokens/s, memory and the time left; a second one during a validation.

    One line each: a narrow terminal cuts off the last metrics, never the steps or the time left. `first` is the step that the
    run starts from; None: only validations are shown.
    """

    def __init__(self, first: int | None, console: Console | None = None) -> None:
        self.bar = Progress(
            BarColumn(bar_width=BAR_WIDTH),
            TextColumn("{task.fields[unit]}{task.completed}/{task.total}", table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[metrics]}", table_column=Column(no_wrap=True, ratio=1)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            TextColumn("left", table_column=Column(no_wrap=True)),
            console=console or Console(stderr=True),
            expand=True,
            speed_estimate_period=ESTIMATE_S,
        )
        is_run = first is not None
        self.task = self.bar.add_task("training", total=None, completed=first or 0, visible=is_run, metrics="", unit="")
        self.validation: TaskID | None = None
        self.bar.start()

    def update(self, step: int, total: float, metrics: dict[str, float]) -> None:
        self.bar.update(self.task, completed=step, total=round(total), metrics=describe(metrics))

    def show_validation(self, done: int, total: int, figures: str) -> None:
        if self.validation is None or done == 0:
            self._end_validation()
            self.validation = self.bar.add_task("validating", total=total, completed=0, metrics="", unit=f"{PROMPT} ")
        self.bar.update(self.validation, completed=done, metrics=figures)
        if done == total:
            self._end_validation()

    def _end_validation(self) -> None:
        if self.validation is not None:
            self.bar.remove_task(self.validation)
            self.validation = None

    def close(self) -> None:
        self._end_validation()
        self.bar.stop()


class LogDisplay(Display):
    """Logs a line at most every `interval_s` seconds, with the estimated remaining time; `first` as above."""

    def __init__(self, first: int | None, interval_s: float) -> None:
        self.first, self.interval_s = first or 0, interval_s
        self.start = self.last = self.validation_start = time.monotonic()

    def update(self, step: int, total: float, metrics: dict[str, float]) -> None:
        now = time.monotonic()
        if now - self.last < self.interval_s and step < total:
            return
        self.last = now
        left_s = (now - self.start) / max(1, step - self.first) * (total - step)
        logger.info("step %d/%.0f  %s  %s left", step, total, describe(metrics), tqdm.format_interval(left_s))

    def show_validation(self, done: int, total: int, figures: str) -> None:
        now = time.monotonic()
        if done == 0:
            self.validation_start = self.last = now
        elif now - self.last >= self.interval_s and done < total:
            self.last = now
            left_s = (now - self.validation_start) / done * (total - done)
            logger.info("%s %d/%d  %s  %s left", PROMPT, done, total, figures, tqdm.format_interval(left_s))


def open_display(first: int | None, interval_s: float, is_main: bool) -> Display:
    """Returns a live display if stderr is a terminal, else a logging one."""
    if not is_main:
        return Display()
    return LiveDisplay(first) if sys.stderr.isatty() else LogDisplay(first, interval_s)


PARTS = (  # metric, format
    ("loss", "loss {:.4f}"),
    ("agreement", "agree {:.3f}"),
    ("estimated_tokens_per_pass", "~{:.2f} tokens/pass"),
    ("tokens_per_s", "{:,.0f} tokens/s"),
    ("memory_gib", "{:.1f} GiB"),
)


def describe(metrics: dict[str, float]) -> str:
    """Returns `loss 0.4120  agree 0.870  ~3.41 tokens/pass  12,345 tokens/s  21.3 GiB`, of the metrics that are present."""
    return "  ".join(form.format(metrics[name]) for name, form in PARTS if name in metrics)

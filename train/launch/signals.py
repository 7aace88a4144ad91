"""Signals that request a stop: the run finishes the step, saves, and exits with code 3."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, ClassVar

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SLURM sends SIGUSR1 ahead of a time limit


class StopFlag:
    """A flag set by SIGTERM, SIGINT and SIGUSR1 while the context is open.

    Attributes:
        ends_process: whether the process exits after a stop. SIGTERM, which would change its exit code, is then ignored from
            the end of the context on.
        is_set: whether a signal has been received.
        is_polled: whether a loop polls the flag. Until then a signal raises KeyboardInterrupt, as a second Ctrl-C always
            does.
    """

    ends_process: ClassVar[bool] = False

    def __init__(self) -> None:
        self.is_set = self.is_polled = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():  # Python allows no other thread to set handlers
            self._previous = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            is_late = number == signal.SIGTERM and self.is_set and self.ends_process
            signal.signal(number, signal.SIG_IGN if is_late else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.is_polled or (self.is_set and number == signal.SIGINT):
            raise KeyboardInterrupt
        self.is_set = True


def ignore_sigterm() -> None:
    """Keeps SIGTERM from changing the exit code of a process that has saved and is about to exit."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

"""Signals that ask a run to stop: it finishes the step, saves, and exits with its own code."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SIGUSR1: what SLURM sends ahead of a time limit


class StopSignal:
    """A flag that SIGTERM, SIGINT and SIGUSR1 set while the context is open.

    Attributes:
        is_set: whether a signal has come.
        is_gentle: set it once there is a loop that looks at the flag; before that a signal interrupts at once, as the
            second Ctrl-C always does.
    """

    def __init__(self) -> None:
        self.is_set = self.is_gentle = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.is_gentle or (self.is_set and number == signal.SIGINT):
            raise KeyboardInterrupt
        self.is_set = True


def ignore_termination() -> None:
    """For a process that has stopped, saved and is on its way out: from now on SIGTERM does not change its exit code."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

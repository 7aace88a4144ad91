"""Logging of a process to stderr."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LOGGED_PACKAGES = ("train", "data_prep", "checkpoints", "sage")


def configure_logging(debug: bool, is_main: bool = True) -> None:
    """Logs to stderr: everything on rank 0, only errors on the other ranks."""
    level = (logging.DEBUG if debug else logging.INFO) if is_main else logging.ERROR
    handler = StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    for name in LOGGED_PACKAGES:
        own = logging.getLogger(name)
        own.handlers, own.propagate = [handler], False
        own.setLevel(level)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a live progress bar replaces in order to redraw itself below the messages."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

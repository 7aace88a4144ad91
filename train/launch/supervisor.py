"""Watching over ranks that this process has started: who died first, what it said, signals on their way to them.

A rank that goes down leaves its error as a file in a folder that launcher and ranks share; a second after the first death the
launcher kills the rest, so nobody waits for a time-out.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from pathlib import Path
from typing import Any

from sage.cli import EXIT_CRASH, EXIT_STOPPED
from train.launch.failures import STOPPED_AT_ONCE, Failure, RankFailed
from train.launch.signals import STOP_SIGNALS

GRACE_S = 1.0  # how long ranks may take to report their own error after the first one died
POLL_S = 0.1


class Watch:
    """Sees ranks die, kills the rest, and knows afterwards who was first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.first_dead: dict[int, int] = {}  # pid -> exit code, as found at the first death
        self.asked_to_stop = False
        self._others = set(active_children())
        self._children: dict[int, Any] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            for child in set(active_children()) - self._others:
                self._children.setdefault(int(child.pid or 0), child)
            if self._dead():
                self.first_dead = self._dead()  # once more: whom its loss has ended may be seen dead before the one that died
                self._done.wait(GRACE_S)
                self.kill()
                return

    def _dead(self) -> dict[int, int]:
        return {pid: child.exitcode for pid, child in self._children.items() if child.exitcode not in (None, 0)}

    def kill(self) -> None:
        """Ends every rank that is still there."""
        for child in self._children.values():
            if child.is_alive():
                child.kill()

    def forward(self, number: int, frame: Any) -> None:
        """Hands a wish to stop on to the ranks; a second Ctrl-C ends them at once."""
        if self.asked_to_stop and number == signal.SIGINT:
            self.kill()
            return
        self.asked_to_stop = True
        for child in self._children.values():
            if child.is_alive():
                os.kill(child.pid, signal.SIGUSR1)

    def verdict(self) -> RankFailed:
        """The error a person should see: a rank killed from outside, else the first report that is no echo of another.

        As soon as one rank is gone torch ends the others with SIGTERM, and both may be seen at once: a SIGTERM says least.
        """
        reports = [Failure(**json.loads(path.read_text())) for path in self.folder.glob("rank_*.json")]
        ranks = {int(path.read_text()): int(path.stem.split("_")[1]) for path in self.folder.glob("rank_*.pid")}
        if self.asked_to_stop:
            return RankFailed(STOPPED_AT_ONCE, EXIT_STOPPED)
        first = min(reports, key=lambda report: (report.is_echo, report.time), default=None)
        killed = {pid: signal.Signals(-code).name for pid, code in self.first_dead.items() if code < 0}
        pid = min(killed, key=lambda pid: killed[pid] == "SIGTERM", default=None)
        if pid is not None and (killed[pid] != "SIGTERM" or first is None or first.is_echo):
            hint = " (out of memory?)" if killed[pid] == "SIGKILL" else ""
            return RankFailed(f"rank {ranks.get(pid, '?')} was killed by {killed[pid]}{hint}", EXIT_CRASH)
        if first is not None:
            return RankFailed(first.message, first.exit_code, first.details)
        return RankFailed("a rank ended before it could say why; run with launch.ranks=1 to see", EXIT_CRASH)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


@contextmanager
def watching(folder: Path) -> Iterator[Watch]:
    """Watches over ranks started inside the block, and hands signals on to them."""
    watch = Watch(folder)
    is_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, watch.forward) for number in STOP_SIGNALS} if is_main_thread else {}
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


def quiet(*names: str) -> None:
    """Silences a library's loggers that report what we report better."""
    for known in [*names, *logging.root.manager.loggerDict]:
        if known.startswith(names):
            logging.getLogger(known).setLevel(logging.CRITICAL + 1)

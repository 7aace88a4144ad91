"""Supervision of spawned ranks: detects the first failure, forwards signals, and kills the other ranks after a second."""

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

from sage.commands.cli import EXIT_CRASH
from train.launch.failures import Failure, RankFailed
from train.launch.signals import STOP_SIGNALS

GRACE_S = 1.0  # time for the ranks to report their own errors after the first one has exited
POLL_S = 0.1


class Supervisor:
    """Polls the child processes; ranks write their error (`rank_N.json`, a `Failure`) and pid (`rank_N.pid`) to `folder`.

    Attributes:
        failed: pid -> exit code of the ranks that had failed when the first failure was detected.
        is_stop_requested: whether a signal has been forwarded to the ranks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed: dict[int, int] = {}
        self.is_stop_requested = False
        self._other_processes = set(active_children())
        self._children: dict[int, Any] = {}

    def poll(self, done: threading.Event) -> None:
        """Looks for failed ranks until `done` is set; kills the others after the first failure."""
        while not done.wait(POLL_S):
            for child in set(active_children()) - self._other_processes:
                self._children.setdefault(int(child.pid or 0), child)
            if self._find_failed():
                self.failed = self._find_failed()  # again: a secondary failure may be visible before its cause
                done.wait(GRACE_S)
                self.kill()
                return

    def _find_failed(self) -> dict[int, int]:
        return {pid: child.exitcode for pid, child in self._children.items() if child.exitcode not in (None, 0)}

    def kill(self) -> None:
        """Kills every remaining rank."""
        for child in self._children.values():
            if child.is_alive():
                child.kill()

    def forward(self, number: int, frame: Any) -> None:
        """Signal handler: requests a stop of every rank; kills them at a second Ctrl-C."""
        if self.is_stop_requested and number == signal.SIGINT:
            self.kill()
            return
        self.is_stop_requested = True
        for child in self._children.values():
            if child.is_alive():
                os.kill(child.pid, signal.SIGUSR1)

    def root_cause(self) -> RankFailed:
        """Returns the error to report: of a rank killed from outside, else the first failure that is not secondary.

        torch sends SIGTERM to the other ranks once one has exited, and both exits may be detected in one poll. Therefore
        SIGTERM counts least.
        """
        reports = [Failure(**json.loads(path.read_text())) for path in self.folder.glob("rank_*.json")]
        ranks = {int(path.read_text()): int(path.stem.split("_")[1]) for path in self.folder.glob("rank_*.pid")}
        first = min(reports, key=lambda report: (report.is_secondary, report.time), default=None)
        killed = {pid: signal.Signals(-code).name for pid, code in self.failed.items() if code < 0}
        pid = min(killed, key=lambda pid: killed[pid] == "SIGTERM", default=None)
        if pid is not None and (killed[pid] != "SIGTERM" or first is None or first.is_secondary):
            hint = " (out of memory?)" if killed[pid] == "SIGKILL" else ""
            return RankFailed(f"rank {ranks.get(pid, '?')} was killed by {killed[pid]}{hint}", EXIT_CRASH)
        if first is not None:
            return RankFailed(first.message, first.exit_code, first.details)
        return RankFailed("a rank exited without reporting an error; run with launch.ranks=1 to see it", EXIT_CRASH)


@contextmanager
def supervise(folder: Path) -> Iterator[Supervisor]:
    """Supervises the ranks started inside the block and forwards signals to them."""
    supervisor = Supervisor(folder)
    is_main_thread = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, supervisor.forward) for number in STOP_SIGNALS} if is_main_thread else {}
    done = threading.Event()
    thread = threading.Thread(target=supervisor.poll, args=(done,), name="rank-supervisor", daemon=True)
    thread.start()
    try:
        yield supervisor
    finally:
        done.set()
        thread.join()
        for number, handler in previous.items():
            signal.signal(number, handler)


def silence_loggers(*names: str) -> None:
    """Silences the loggers of a library whose reports `root_cause` replaces."""
    for known in [*names, *logging.root.manager.loggerDict]:
        if known.startswith(names):
            logging.getLogger(known).setLevel(logging.CRITICAL + 1)

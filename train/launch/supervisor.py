"""Supervision of spawned ranks: detects the first failure, forwards signals, and kills the other ranks after a second.

When one rank fails, the others soon lose the connection to it and fail as well; those failures must not hide the first one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import active_children
from pathlib import Path
from typing import Any

from checkpoints.run_folder import list_steps, state_folder
from sage.commands.cli import EXIT_CRASH, EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USER, NOTHING_SAVED, is_crash
from train.launch.signals import STOP_SIGNALS

GRACE_S = 1.0  # time for the ranks to report their own errors after the first one has exited
POLL_S = 0.1
LAST_LINES = 20  # that are shown of the output of a rank that has reported no error
LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket|timed out|recvvalue|remote (worker|process)|nccl",
    re.IGNORECASE,
)
INTERRUPTED = "stopped at once; earlier saved states are complete, continue with run.resume=true"
LOST_RANK = "lost the connection to another rank, which was killed or lost its machine (out of memory? see the system's log)"


class RankFailed(RuntimeError):
    """A rank failed and ended the run. `details` holds its traceback, `exit_code` the exit code of the run."""

    def __init__(self, message: str, exit_code: int, details: str = "") -> None:
        super().__init__(message)
        self.exit_code, self.details = exit_code, details


def interrupted(run_dir: str | Path) -> RankFailed:
    """Returns the error of a run that was stopped without saving: exit code 3 if an earlier state of it is saved, else 130."""
    is_saved = bool(list_steps(state_folder(run_dir)))
    return RankFailed(INTERRUPTED, EXIT_STOPPED) if is_saved else RankFailed(NOTHING_SAVED, EXIT_INTERRUPTED)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The error that ended a rank: a message of one line, and a traceback in `details` for a crash."""

    message: str
    exit_code: int
    details: str = ""
    is_secondary: bool = False  # looks like the consequence of another rank's failure
    time: float = field(default_factory=time.time)


def describe(error: BaseException, rank: int) -> Failure:
    own_code = getattr(error, "exit_code", None)
    is_unexpected = own_code is None and isinstance(error, Exception) and is_crash(error)
    is_secondary = is_unexpected and isinstance(error, RuntimeError) and LOST_CONNECTION.search(str(error)) is not None
    line = " ".join(str(error).split()) or type(error).__name__
    if is_secondary:
        line = f"rank {rank}: {LOST_RANK}: {line}"
    elif is_unexpected:
        line = f"rank {rank}: {type(error).__name__}: {line}"
    return Failure(
        message=line,
        exit_code=own_code if own_code is not None else EXIT_CRASH if is_crash(error) else EXIT_USER,
        details="".join(traceback.format_exception(error)) if is_unexpected and not is_secondary else "",
        is_secondary=is_secondary,
    )


class Supervisor:
    """Polls the child processes; ranks write their error (`rank_N.json`, a `Failure`) and pid (`rank_N.pid`) to `folder`.

    Attributes:
        failed: pid -> exit code of the ranks that had failed before the others were killed.
        is_stop_requested: whether a signal has been forwarded to the ranks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed: dict[int, int] = {}
        self.is_stop_requested = False
        self._other_processes = set(active_children())
        self._children: dict[int, Any] = {}
        self._has_killed = False

    def poll(self, done: threading.Event) -> None:
        """Looks for failed ranks until `done` is set; kills the others after the first failure."""
        while not done.wait(POLL_S):
            for child in set(active_children()) - self._other_processes:
                self._children.setdefault(int(child.pid or 0), child)
            if self._find_failed():
                done.wait(GRACE_S)
                self._update_failed()
                self.kill()
                return

    def _update_failed(self) -> None:
        """Looks again: a secondary failure may be visible before its cause, whose exit torch may be collecting."""
        if not self._has_killed:
            self.failed |= self._find_failed()

    def _find_failed(self) -> dict[int, int]:
        return {pid: child.exitcode for pid, child in self._children.items() if child.exitcode not in (None, 0)}

    def kill(self) -> None:
        """Kills every remaining rank."""
        self._has_killed = True
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

    def stopped(self, run_dir: str) -> RankFailed:
        """Returns the error of a run that a signal has stopped: that of a rank that has saved its work, else `interrupted`."""
        saved = next((report for report in self._reports() if report.exit_code == EXIT_STOPPED), None)
        return interrupted(run_dir) if saved is None else RankFailed(saved.message, EXIT_STOPPED)

    def _reports(self) -> list[Failure]:
        return [Failure(**json.loads(path.read_text())) for path in self.folder.glob("rank_*.json")]

    def root_cause(self) -> RankFailed:
        """Returns the error to report: of a rank killed from outside, else the first failure that is not secondary.

        torch sends SIGTERM to the other ranks once one has exited, and both exits may be detected in one poll. Therefore
        SIGTERM counts least.
        """
        self._update_failed()  # torch may have found the failure first
        reports = self._reports()
        ranks = {int(path.read_text()): int(path.stem.split("_")[1]) for path in self.folder.glob("rank_*.pid")}
        first = min(reports, key=lambda report: (report.is_secondary, report.time), default=None)
        killed = {pid: signal.Signals(-code).name for pid, code in self.failed.items() if code < 0}
        pid = min(killed, key=lambda pid: killed[pid] == "SIGTERM", default=None)
        if pid is not None and (killed[pid] != "SIGTERM" or first is None or first.is_secondary):
            hint = " (out of memory?)" if killed[pid] == "SIGKILL" else ""
            return RankFailed(f"rank {ranks.get(pid, '?')} was killed by {killed[pid]}{hint}", EXIT_CRASH)
        if first is not None:
            return RankFailed(first.message, first.exit_code, first.details)
        exits = ", ".join(f"rank {ranks.get(pid, '?')} with code {code}" for pid, code in self.failed.items())
        message = f"a rank exited without reporting an error ({exits or 'exit codes are unknown'})"
        return RankFailed(f"{message}; run with launch.ranks=1 to see it", EXIT_CRASH, self._last_output())

    def _last_output(self) -> str:
        """Returns the last lines that each rank without the terminal has written, below the name of its file."""
        written = {path: path.read_text(errors="replace").splitlines() for path in sorted(self.folder.rglob("std*.log"))}
        return "".join(
            "\n".join([f"rank {path.parent.name}, {path.stem}:", *lines[-LAST_LINES:], ""])
            for path, lines in written.items()
            if lines
        )


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

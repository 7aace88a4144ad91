"""Signals that request a stop, and supervision of spawned ranks: the first failure is reported, then the others are killed.

When a rank fails, the others soon lose the connection to it and fail as well; those failures must not hide the first one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar, Self

from checkpoints.run_folder import list_steps, state_folder
from sage.commands.cli import EXIT_CRASH, EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USER, NOTHING_SAVED, is_crash
from sage.io.files import read_json, write_text

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SLURM sends SIGUSR1 ahead of a time limit
GRACE_S = 1.0
LAST_LINES = 20  # that are shown of the output of a rank that has reported no error
TIMED_OUT = re.compile(r"timed out waiting (\d+)ms", re.IGNORECASE)  # of gloo, on the rank that waits
NCCL_TIMED_OUT = "Watchdog caught collective operation timeout"  # is logged before NCCL's thread aborts the process
LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket|timed out|recvvalue|remote (worker|process)|nccl",
    re.IGNORECASE,
)
LOST_RANK = "lost the connection to another rank, which was killed or lost its machine (out of memory? see the system's log)"


class SignalHandler:
    """Calls `_handle` for SIGTERM, SIGINT and SIGUSR1 while the context is open."""

    ignored_after: tuple[signal.Signals, ...] = ()  # the end of the context

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()  # Python allows no other thread to set handlers
        self._previous = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS if is_main}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if number in self.ignored_after else handler)

    def _handle(self, number: int, _: Any) -> None:
        raise NotImplementedError


class StopFlag(SignalHandler):
    """A flag that signals set: the run finishes the step, saves, and exits with code 3."""

    ends_process: ClassVar[bool] = False  # after a stop: SIGTERM, which would change the exit code, is ignored from then on
    is_set = False
    is_polled = False  # by a loop; until then a signal raises KeyboardInterrupt, as a second Ctrl-C always does

    def _handle(self, number: int, _: Any) -> None:
        if not self.is_polled or (self.is_set and number == signal.SIGINT):
            raise KeyboardInterrupt
        self.is_set = True
        self.ignored_after = (signal.SIGTERM,) if self.ends_process else ()


class RankFailed(RuntimeError):
    """The error that ended a rank, and the run: a message of one line, the exit code, a traceback in `details` for a crash.

    Attributes:
        is_secondary: looks like the consequence of another rank's failure.
        waited_s: the time limit of a collective operation, which this rank has reached.
        time: seconds since the epoch.
    """

    def __init__(self, message: str, exit_code: int = EXIT_CRASH, details: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.exit_code, self.details = exit_code, details
        self.is_secondary: bool = facts.get("is_secondary", False)
        self.waited_s: int | None = facts.get("waited_s")
        self.time: float = facts.get("time", time.time())

    def write(self, file: Path) -> None:
        """Writes the error for the process that has started the rank."""
        write_text(file, json.dumps({"message": str(self), **vars(self)}))


def interrupted(run_dir: str | Path | None) -> RankFailed:
    """Returns the error of a run that was stopped without saving: exit code 3 if an earlier state of it is saved, else 130."""
    if run_dir is None or not list_steps(state_folder(run_dir)):
        return RankFailed(NOTHING_SAVED, EXIT_INTERRUPTED)
    return RankFailed("stopped at once; earlier saved states are complete, continue with run.resume=true", EXIT_STOPPED)


def describe(error: BaseException, rank: int, run_dir: str | Path | None = None) -> RankFailed:
    """Returns the error of a rank, in its words for the user."""
    error = interrupted(run_dir) if isinstance(error, KeyboardInterrupt) else error
    line = " ".join(str(error).split()) or type(error).__name__
    if (code := getattr(error, "exit_code", None)) is not None:
        return RankFailed(line, code)
    if not is_crash(error) or not isinstance(error, Exception):
        return RankFailed(line, EXIT_CRASH if is_crash(error) else EXIT_USER)
    details = "".join(traceback.format_exception(error))
    if isinstance(error, RuntimeError) and (timed_out := TIMED_OUT.search(line)):
        waited_s = int(timed_out.group(1)) // 1000
        return RankFailed(time_out_line([rank], waited_s), details=details, waited_s=waited_s)
    if isinstance(error, RuntimeError) and LOST_CONNECTION.search(line):
        return RankFailed(f"rank {rank}: {LOST_RANK}: {line}", is_secondary=True)
    return RankFailed(f"rank {rank}: {type(error).__name__}: {line}", details=details)


def time_out_line(ranks: Sequence[int], waited_s: int) -> str:
    """Returns the message for ranks that have waited for others in a collective operation."""
    names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return (
        f"{names} waited {waited_s:,} s in a collective operation for a rank that still works, or hangs; if it needs "
        f"longer, for instance for a validation, raise launch.timeout_s, then continue with run.resume=true"
    )


class Supervisor(SignalHandler):
    """Waits for spawned ranks and forwards signals to them while its context is open.

    A rank that fails writes its error to `rank_N.json` in `folder`; all but rank 0 have their output in
    `rank_N.log`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed: dict[int, int] = {}  # exit codes of the ranks that had failed before the others were killed
        self.is_stop_requested = False
        self._ranks: Sequence[BaseProcess] = ()

    def wait(self, ranks: Sequence[BaseProcess], run_dir: str | None) -> int:
        """Waits for all ranks; returns 0, or 3 if a signal stopped them after saving. RankFailed if a rank failed."""
        self._ranks = ranks
        if self.is_stop_requested:  # while they were started
            self._request_stop()
        while (running := [rank.sentinel for rank in ranks if rank.exitcode is None]) and not self._find_failed():
            wait(running)
        if self._find_failed():
            deadline = time.monotonic() + GRACE_S  # for the others to report their own errors
            for rank in ranks:
                rank.join(max(0.0, deadline - time.monotonic()))
            self.failed = self._find_failed()
            self._kill()
            raise self.stopped(run_dir) if self.is_stop_requested else self.root_cause()
        return max((rank.exitcode or 0 for rank in ranks), default=0)

    def _find_failed(self) -> dict[int, int]:
        codes, reports = {number: rank.exitcode or 0 for number, rank in enumerate(self._ranks)}, self._reports()
        # a rank that has stopped after saving exits with 3 and reports no error
        return {number: code for number, code in codes.items() if code not in (0, EXIT_STOPPED) or (code and number in reports)}

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.join()

    def _handle(self, number: int, _: Any) -> None:
        """Requests a stop of every rank; kills them at a second Ctrl-C."""
        if self.is_stop_requested and number == signal.SIGINT:
            self._kill()
            return
        self.is_stop_requested = True
        self._request_stop()

    def _request_stop(self) -> None:
        for rank in self._ranks:
            if rank.is_alive() and rank.pid is not None:
                os.kill(rank.pid, signal.SIGUSR1)

    def stopped(self, run_dir: str | None) -> RankFailed:
        """Returns the error of a run that a signal has stopped: that of a rank that has saved its work, else `interrupted`."""
        saved = next((report for report in self._reports().values() if report.exit_code == EXIT_STOPPED), None)
        return interrupted(run_dir) if saved is None else saved

    def _reports(self) -> dict[int, RankFailed]:
        paths = self.folder.glob("rank_*.json")
        return {int(path.stem.removeprefix("rank_")): RankFailed(**read_json(path)) for path in paths}

    def root_cause(self) -> RankFailed:
        """Returns the error to report: of a rank killed from outside, else the first failure that is not secondary."""
        reports, logs = self._reports(), sorted(self.folder.glob("rank_*.log"))  # of the ranks without the terminal
        lines = {path.stem: path.read_text(errors="replace").splitlines()[-LAST_LINES:] for path in logs}
        output = "".join("\n".join([f"{name}:", *last, ""]) for name, last in lines.items() if last)
        first = min(reports.values(), key=lambda report: (report.is_secondary, report.time), default=None)
        killed = next(((rank, signal.Signals(-code).name) for rank, code in self.failed.items() if code < 0), None)
        if killed is not None:
            rank, name = killed
            if name == "SIGKILL":
                return RankFailed(f"rank {rank} was killed by {name} (out of memory? see dmesg)", EXIT_CRASH)
            limit = f": {NCCL_TIMED_OUT} (half an hour between GPUs, not launch.timeout_s); see which rank hangs"
            reason = limit if NCCL_TIMED_OUT in output else ""
            return RankFailed(f"rank {rank} was killed by {name}{reason}", EXIT_CRASH, output)
        if first is None:
            exits = ", ".join(f"rank {rank} with code {code}" for rank, code in self.failed.items())
            message = f"a rank exited without reporting an error ({exits}); run with launch.ranks=1 to see it"
            return RankFailed(message, EXIT_CRASH, output)
        if first.waited_s is not None:
            waiting = sorted(rank for rank, report in reports.items() if report.waited_s is not None)
            return RankFailed(time_out_line(waiting, first.waited_s), first.exit_code, first.details)
        return first

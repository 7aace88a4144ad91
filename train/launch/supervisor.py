"""Supervision of spawned ranks: waits for the first failure, forwards signals, and kills the other ranks after a second.

When one rank fails, the others soon lose the connection to it and fail as well; those failures must not hide the first one.
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
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from checkpoints.run_folder import list_steps, state_folder
from sage.commands.cli import EXIT_CRASH, EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USER, NOTHING_SAVED, is_crash
from train.launch.signals import STOP_SIGNALS

GRACE_S = 1.0  # time for the ranks to report their own errors after the first one has exited
LAST_LINES = 20  # that are shown of the output of a rank that has reported no error
TIMED_OUT = re.compile(r"timed out waiting (\d+)ms", re.IGNORECASE)  # of gloo, on the rank that waits
NCCL_TIMED_OUT = "Watchdog caught collective operation timeout"  # is logged before NCCL's thread aborts the process
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
    waited_s: int | None = None  # the time limit of a collective operation, which this rank has reached
    time: float = field(default_factory=time.time)


def describe(error: BaseException, rank: int) -> Failure:
    own_code = getattr(error, "exit_code", None)
    is_unexpected = own_code is None and isinstance(error, Exception) and is_crash(error)
    timed_out = TIMED_OUT.search(str(error)) if is_unexpected and isinstance(error, RuntimeError) else None
    waited_s = int(timed_out.group(1)) // 1000 if timed_out is not None else None
    is_secondary = is_unexpected and isinstance(error, RuntimeError) and LOST_CONNECTION.search(str(error)) is not None
    is_secondary = is_secondary and waited_s is None
    line = " ".join(str(error).split()) or type(error).__name__
    if waited_s is not None:
        line = time_out_line([rank], waited_s)
    elif is_secondary:
        line = f"rank {rank}: {LOST_RANK}: {line}"
    elif is_unexpected:
        line = f"rank {rank}: {type(error).__name__}: {line}"
    return Failure(
        message=line,
        exit_code=own_code if own_code is not None else EXIT_CRASH if is_crash(error) else EXIT_USER,
        details="".join(traceback.format_exception(error)) if is_unexpected and not is_secondary else "",
        is_secondary=is_secondary,
        waited_s=waited_s,
    )


def time_out_line(ranks: Sequence[int], waited_s: int) -> str:
    """Returns the message for ranks that have waited for others in a collective operation."""
    names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return (
        f"{names} waited {waited_s:,} s in a collective operation for a rank that still works, or hangs; if it needs "
        f"longer, for instance for a validation, raise launch.timeout_s, then continue with run.resume=true"
    )


class Supervisor:
    """Waits for spawned ranks and forwards signals to them while its context is open.

    A rank that fails writes its error, a `Failure`, to `rank_N.json` in `folder`; all but rank 0 have their output in
    `rank_N.log`.

    Attributes:
        failed: rank -> exit code of the ranks that had failed before the others were killed.
        is_stop_requested: whether a signal has been forwarded to the ranks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed: dict[int, int] = {}
        self.is_stop_requested = False
        self._ranks: Sequence[BaseProcess] = ()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Supervisor:
        if threading.current_thread() is threading.main_thread():  # Python allows no other thread to set handlers
            self._previous = {number: signal.signal(number, self._forward) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def wait(self, ranks: Sequence[BaseProcess], run_dir: str) -> int:
        """Waits until all ranks have exited; after the first failure, the others have a second to report their own errors.

        Returns:
            the exit code: 0 done, 3 stopped by a signal after saving.

        Raises:
            RankFailed: a rank failed.
        """
        self._ranks = ranks
        if self.is_stop_requested:  # while they were started
            self._request_stop()
        while running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
            if self._find_failed():
                break
            wait(running)
        if self._find_failed():
            deadline = time.monotonic() + GRACE_S
            for rank in ranks:
                rank.join(max(0.0, deadline - time.monotonic()))
            self.failed = self._find_failed()
            self.kill()
            raise self.stopped(run_dir) if self.is_stop_requested else self.root_cause()
        return max((rank.exitcode or 0 for rank in ranks), default=0)

    def _find_failed(self) -> dict[int, int]:
        """A rank that has stopped after saving exits with 3 and reports no error."""
        codes, reports = {number: rank.exitcode or 0 for number, rank in enumerate(self._ranks)}, self._reports()
        return {number: code for number, code in codes.items() if code not in (0, EXIT_STOPPED) or (code and number in reports)}

    def kill(self) -> None:
        """Kills every remaining rank, and waits for it."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.join()

    def _forward(self, number: int, frame: Any) -> None:
        """Signal handler: requests a stop of every rank; kills them at a second Ctrl-C."""
        if self.is_stop_requested and number == signal.SIGINT:
            self.kill()
            return
        self.is_stop_requested = True
        self._request_stop()

    def _request_stop(self) -> None:
        for rank in self._ranks:
            if rank.is_alive() and rank.pid is not None:
                os.kill(rank.pid, signal.SIGUSR1)

    def stopped(self, run_dir: str) -> RankFailed:
        """Returns the error of a run that a signal has stopped: that of a rank that has saved its work, else `interrupted`."""
        saved = next((report for report in self._reports().values() if report.exit_code == EXIT_STOPPED), None)
        return interrupted(run_dir) if saved is None else RankFailed(saved.message, EXIT_STOPPED)

    def _reports(self) -> dict[int, Failure]:
        paths = self.folder.glob("rank_*.json")
        return {int(path.stem.split("_")[1]): Failure(**json.loads(path.read_text())) for path in paths}

    def root_cause(self) -> RankFailed:
        """Returns the error to report: of a rank killed from outside, else the first failure that is not secondary."""
        first = min(self._reports().values(), key=lambda report: (report.is_secondary, report.time), default=None)
        killed = next((rank for rank, code in self.failed.items() if code < 0), None)
        if killed is not None:
            return self._killed(killed)
        if first is not None and first.waited_s is not None:
            waiting = sorted(rank for rank, report in self._reports().items() if report.waited_s is not None)
            return RankFailed(time_out_line(waiting, first.waited_s), first.exit_code, first.details)
        if first is not None:
            return RankFailed(first.message, first.exit_code, first.details)
        exits = ", ".join(f"rank {rank} with code {code}" for rank, code in self.failed.items())
        message = f"a rank exited without reporting an error ({exits}); run with launch.ranks=1 to see it"
        return RankFailed(message, EXIT_CRASH, self._last_output())

    def _killed(self, rank: int) -> RankFailed:
        """Returns the error of a rank that was killed, or has aborted, by a signal."""
        name, output = signal.Signals(-self.failed[rank]).name, self._last_output()
        if name == "SIGKILL":
            return RankFailed(f"rank {rank} was killed by {name} (out of memory? see dmesg)", EXIT_CRASH)
        if NCCL_TIMED_OUT in output:
            reason = f"{NCCL_TIMED_OUT} (half an hour between GPUs, not launch.timeout_s); see which rank hangs"
            return RankFailed(f"rank {rank} was killed by {name}: {reason}", EXIT_CRASH, output)
        return RankFailed(f"rank {rank} was killed by {name}", EXIT_CRASH, output)

    def _last_output(self) -> str:
        """Returns the last lines of each rank without the terminal."""
        written = {path.stem: path.read_text(errors="replace").splitlines() for path in sorted(self.folder.glob("rank_*.log"))}
        return "".join("\n".join([f"{name}:", *lines[-LAST_LINES:], ""]) for name, lines in written.items() if lines)

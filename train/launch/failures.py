"""One-line descriptions of failures of ranks, and the distinction between a cause and its consequences.

When one rank fails, the others soon lose the connection to it and fail as well; those failures must not hide the first one.
"""

from __future__ import annotations

import re
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints.run_folder import list_steps, state_folder
from sage.commands.cli import EXIT_CRASH, EXIT_STOPPED, EXIT_USER
from train.console.errors import NOTHING_SAVED, is_crash

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
    """Returns the error of a run that was stopped without saving: exit code 3 only if an earlier state of it is saved."""
    is_saved = bool(list_steps(state_folder(run_dir)))
    return RankFailed(INTERRUPTED, EXIT_STOPPED) if is_saved else RankFailed(NOTHING_SAVED, EXIT_CRASH)


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

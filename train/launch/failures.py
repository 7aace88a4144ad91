"""A rank's failure in a person's words, and which of several failures is the cause.

When one rank goes down, the others fail soon after because they have lost it. Those failures are echoes: shown alone they
hide what happened.
"""

from __future__ import annotations

import re
import time
import traceback
from dataclasses import dataclass

from sage.cli import EXIT_CRASH, EXIT_STOPPED, EXIT_USER
from train.config.hydra_app import is_crash

ECHO = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket|timed out|recvvalue|remote (worker|process)|nccl",
    re.IGNORECASE,
)
STOPPED_AT_ONCE = "stopped at once; what was saved before is whole, go on with run.resume=true"
LOST = "lost another rank, which was killed or lost its machine (out of memory? see the system's log)"


class RankFailed(RuntimeError):
    """A rank went down and took the run with it. `details` holds its traceback, `exit_code` the run's code."""

    def __init__(self, message: str, exit_code: int, details: str = "") -> None:
        super().__init__(message)
        self.exit_code, self.details = exit_code, details


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What one rank ended with.

    Attributes:
        message: one line.
        details: a traceback, where the failure is ours rather than the user's.
        is_echo: whether it looks like the loss of another rank.
        time: seconds since the epoch.
    """

    message: str
    exit_code: int
    details: str
    is_echo: bool
    time: float


def describe(error: BaseException, rank: int) -> Failure:
    """An error on a rank, as it is told to a person."""
    if isinstance(error, KeyboardInterrupt):
        return Failure(message="stopped", exit_code=EXIT_STOPPED, details="", is_echo=False, time=time.time())
    own_code = getattr(error, "exit_code", None)
    is_ours = own_code is None and isinstance(error, Exception) and is_crash(error)
    is_echo = is_ours and isinstance(error, RuntimeError) and ECHO.search(str(error)) is not None
    line = " ".join(str(error).split()) or type(error).__name__
    if is_echo:
        line = f"rank {rank}: {LOST}: {line}"
    elif is_ours:
        line = f"rank {rank}: {type(error).__name__}: {line}"
    return Failure(
        message=line,
        exit_code=own_code if own_code is not None else EXIT_CRASH if is_crash(error) else EXIT_USER,
        details="".join(traceback.format_exception(error)) if is_ours and not is_echo else "",
        is_echo=is_echo,
        time=time.time(),
    )

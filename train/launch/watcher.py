"""A process that reports the death of another one, which cannot do so itself when the kernel kills it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ENDED = b"ended"  # is sent when the process ends in any other way
WATCH = f"import sys; sys.exit() if sys.stdin.buffer.read() == {ENDED!r} else print('error: ' + sys.argv[1], file=sys.stderr)"
KILLED = (
    "{run}: the process was killed by a signal, SIGKILL if the kernel did (out of memory? see dmesg); continue from the last "
    "saved state with sage-train --resume {run}"
)


@contextmanager
def reported_if_killed(run_dir: str) -> Iterator[None]:
    """Reports on stderr if this process dies inside the block without leaving it; a second process waits for that."""
    command = [sys.executable, "-ISc", WATCH, KILLED.format(run=run_dir)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        with suppress(OSError):
            watcher.communicate(ENDED)

"""The folder of compiled passes: a lock per package, and deletion of packages that are no longer used."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from sage.io.files import user_cache_dir

PACKAGE_SUFFIX = ".pt2"
UNUSED_DAYS = 90
MAX_BYTES = 500_000_000
MIN_FREE_BYTES = 20_000_000  # a package has a few MB
DAY_S = 86400.0
_SHOWN: set[str] = set()  # by `warn_once`


def passes_folder() -> Path:
    """Returns the folder of compiled passes."""
    return user_cache_dir() / "passes"


def warn_once(text: str) -> None:
    """Warns if the process has not said the same before. `warnings` forgets what it has shown whenever a pass is compiled."""
    if text not in _SHOWN:
        _SHOWN.add(text)
        warnings.warn(text, stacklevel=3)


def writable_path(path: Path) -> Path:
    """Returns `path`, or one in a temporary folder, with a warning, if its folder cannot be written or its disk is full."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent):
            if shutil.disk_usage(path.parent).free < MIN_FREE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return path
    except OSError as error:
        warn_once(f"passes: {path.parent}: {error.strerror}; compiled passes are not kept")
        return Path(_temporary_folder().name) / path.name


@cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder of this process, which is deleted when it ends."""
    return tempfile.TemporaryDirectory(prefix="sage_passes_")


@contextmanager
def only_process(path: Path, label: str) -> Iterator[None]:
    """Keeps other processes from compiling to `path`; waits while one does. `label` names the pass in the message."""
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"passes: waiting for another process that compiles {label}", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # waiters check again and find the package
        lock.release()


def mark_used(path: Path) -> None:
    """Sets the time of the last use of a package to now, if the folder can be written."""
    with suppress(OSError):
        os.utime(path)


def prune(folder: Path) -> None:
    """Deletes packages unused for `UNUSED_DAYS`, and the least recently used ones beyond `MAX_BYTES`. A process that has loaded
    one keeps it.
    """
    total = 0
    with suppress(OSError):
        found = [(path.stat(), path) for path in folder.glob(f"[!.]*{PACKAGE_SUFFIX}")]
        for stat, path in sorted(found, key=lambda one: one[0].st_mtime, reverse=True):
            total += stat.st_size
            if total > MAX_BYTES or time.time() - stat.st_mtime > UNUSED_DAYS * DAY_S:
                path.unlink(missing_ok=True)

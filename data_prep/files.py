"""Files several ranks may write at once: a lock, a temporary name, one rename."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

logger = logging.getLogger(__name__)


def default_cache_dir(configured: str = "") -> Path:
    """`configured`, or `sage-draft` under $XDG_CACHE_HOME (or ~/.cache)."""
    if configured:
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sage-draft"


def prune(folder: Path, keep: int) -> None:
    """Deletes all but the `keep` last used folders in a cache folder; whoever has files of one open keeps them."""
    found = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in found[: max(0, len(found) - keep)]:
        shutil.rmtree(path, ignore_errors=True)
        logger.info("%s: deleted, not used for the longest time", path)


class CannotWrite(OSError):
    """The disk is full or not to be written to; the message names the place."""


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Names `path` in the errors of a block that writes there: a full disk says nothing but that it is full."""
    try:
        yield
    except CannotWrite:
        raise
    except OSError as error:
        if error.filename is not None and not _is_on_the_way(Path(str(error.filename)), path):
            raise  # somebody else's file
        reason = error.strerror or error
        raise CannotWrite(f"{path}: could not be written ({reason}); make room there, or name another place") from error


def _is_on_the_way(found: Path, path: Path) -> bool:
    """Whether `found` is beside `path`, below that, or one of the folders above."""
    return path.parent in (found, *found.parents) or found in path.parents


def check_writable(path: Path) -> None:
    """Raises CannotWrite before hours of work instead of after them; leaves nothing behind."""
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    with blaming(path):
        try:
            tempfile.TemporaryFile(dir=nearest).close()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock beside `path` among all processes of this machine (and of a shared file system with locks).

    Raises:
        CannotWrite: there can be no file.
    """
    lock = FileLock(path.parent / f".{path.name}.lock")
    with blaming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` (file or folder) only when the block ends without an error.

    An older folder goes just before; whoever has files of it open keeps them.

    Raises:
        CannotWrite: the disk is full or not to be written to; nothing is left there.
    """
    temporary = path.parent / f"{path.name}.tmp-{os.getpid()}"
    try:
        with blaming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            if temporary.is_file():
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())
            if temporary.is_dir() and path.is_dir():
                shutil.rmtree(path)
            os.replace(temporary, path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)

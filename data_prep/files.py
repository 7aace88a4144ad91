"""The cache folder, locks between processes, and write errors that name the output. Atomic writes themselves: sage.io.files."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from sage.io.files import atomic_path, user_cache_dir

logger = logging.getLogger(__name__)
OTHER_CACHE = "another data.cache_dir"  # the remedy where the cache cannot be written


def default_cache_dir(configured: str = "") -> Path:
    """Returns `configured`, or `sage.io.files.user_cache_dir()`."""
    return Path(configured).expanduser() if configured else user_cache_dir()


def prune_folders(parent: Path, num_kept: int) -> None:
    """Deletes the least recently used subfolders but `num_kept`. Files that a process has open stay readable for it."""
    found = sorted((path for path in parent.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in found[: max(0, len(found) - num_kept)]:
        shutil.rmtree(path, ignore_errors=True)
        logger.info("%s: deleted as least recently used", path)


class CannotWrite(OSError):
    """The output cannot be written: the disk is full, or the path is not writable. The message names the path."""


@contextmanager
def naming_write_errors(path: Path, instead: str = "another path") -> Iterator[None]:
    """Turns an OSError of the block into a `CannotWrite` that names `path`; the error of a full disk names no file.

    Errors of files elsewhere, such as a missing input, pass unchanged.

    Args:
        instead: what the user can choose.
    """
    try:
        yield
    except CannotWrite:
        raise
    except OSError as error:
        if error.filename is not None and not _is_at(Path(str(error.filename)), path):
            raise
        reason = error.strerror or error
        raise CannotWrite(f"{path}: could not be written ({reason}); free disk space, or choose {instead}") from error


def _is_at(found: Path, path: Path) -> bool:
    """Returns whether `found` is in the folder of `path` or below, or one of the folders above."""
    return path.parent in (found, *found.parents) or found in path.parents


def check_writable(path: Path) -> None:
    """Raises CannotWrite if `path` cannot be created; called before the work whose result goes there. Leaves no file."""
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    with naming_write_errors(path):
        try:
            tempfile.TemporaryFile(dir=nearest).close()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def locked(path: Path, instead: str = "another path") -> Iterator[None]:
    """Holds a lock on `path` among all processes of this machine (and of a shared file system that supports locks).

    Raises:
        CannotWrite: the lock file cannot be created.
    """
    lock = FileLock(path.parent / f".{path.name}.lock")
    with naming_write_errors(path, instead):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(path: Path, instead: str = "another path") -> Iterator[Path]:
    """`sage.io.files.atomic_path` that raises CannotWrite if the disk is full or not writable; no file is left."""
    with naming_write_errors(path, instead), atomic_path(path) as temporary:
        yield temporary

"""Files several ranks may write at once: a lock, a temporary name, one rename."""

from __future__ import annotations

import logging
import os
import shutil
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


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock beside `path` among all processes of this machine (and of a shared file system with locks)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.parent / f".{path.name}.lock"):
        yield


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` (file or folder) only when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f"{path.name}.tmp-{os.getpid()}"
    try:
        yield temporary
        if temporary.is_file():
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)

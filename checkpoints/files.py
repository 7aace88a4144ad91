"""Atomic replacement of folders: after a crash the old folder or the new one is in place, never a mixture.

    .NAME.part      being written or being removed; a leftover of a crash is deleted before the next save
    .NAME.old       being replaced; restored if a crash left nothing in its place

Atomic writes of single files are in sage.io.files.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sage.io.files import fsync, fsync_tree

logger = logging.getLogger(__name__)
LEFTOVER = re.compile(r"\.(.+)\.(part|old)")


def part_path(final: Path) -> Path:
    """Returns `.NAME.part`, the temporary name of a folder while it is written."""
    return final.with_name(f".{final.name}.part")


def old_path(final: Path) -> Path:
    """Returns `.NAME.old`, the temporary name of a folder while it is replaced."""
    return final.with_name(f".{final.name}.old")


def replace_folder(part: Path, final: Path) -> None:
    """Moves a finished folder to its final name, replacing an existing folder.

    Where the file system can exchange two names atomically, `final` exists at any time. Elsewhere a crash between two renames
    leaves the existing folder under `old_path(final)`; `restore_interrupted` moves it back.
    """
    restore_interrupted(final)
    copy_permissions(part)
    fsync_tree(part)
    if final.exists() and exchange(part, final):
        fsync(final.parent)
        shutil.rmtree(part)
        return
    if final.exists():
        _rename(final, old_path(final))
    _rename(part, final)
    shutil.rmtree(old_path(final), ignore_errors=True)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yields an empty folder that replaces `final` when the block ends; if it fails, the folder is removed and `final` kept."""
    part = part_path(final)
    try:
        restore_interrupted(final)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        replace_folder(part, final)
    except Exception:
        restore_interrupted(final)
        shutil.rmtree(part, ignore_errors=True)
        raise


def exchange(first: Path, second: Path) -> bool:
    """Exchanges two names atomically; returns False if the system or the file system does not support it."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    cwd = ctypes.c_int(-100)  # AT_FDCWD: relative paths are resolved from the working directory
    names = [ctypes.c_char_p(os.fsencode(path)) for path in (first, second)]
    return bool(renameat2(cwd, names[0], cwd, names[1], ctypes.c_uint(2)) == 0)  # RENAME_EXCHANGE


def restore_interrupted(final: Path) -> None:
    """Restores the previous folder if a crash interrupted `replace_folder` and left nothing under `final`."""
    old = old_path(final)
    if old.exists() and not final.exists():
        logger.warning("%s: a replacement was interrupted; the previous folder is restored", final)
        _rename(old, final)
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Removes partial files and folders of a crash directly in `folder` and restores interrupted replacements.

    Only the process that writes to `folder` may call it.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        found = LEFTOVER.fullmatch(path.name)
        if found and found.group(2) == "old":
            restore_interrupted(folder / found.group(1))
        elif found and path.is_dir():
            shutil.rmtree(path)
        elif found:
            path.unlink()


def remove_folder(folder: Path) -> None:
    """Removes a folder; a crash does not leave a partial folder under its name."""
    part = part_path(folder)
    os.replace(folder, part)
    shutil.rmtree(part)


def copy_permissions(folder: Path) -> None:
    """Gives the files in a folder the folder's permissions: safetensors creates files that only their owner can read."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o777 != mode:
            path.chmod(mode)


def _rename(source: Path, final: Path) -> None:
    os.replace(source, final)
    fsync(final.parent)

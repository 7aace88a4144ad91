"""Folders that are replaced as a whole: states, drafts, exports, validations, targets.

    .NAME.part   being written or being removed; a leftover of a crash is deleted before the next write
    .NAME.old    being replaced; restored if a crash left nothing in its place

After a crash the old folder or the new one is in place, never a mixture. One process writes a folder at a time. Single files
are in sage.io.files. Importing this module imports the standard library only.
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
    _copy_permissions(part)
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
    except BaseException:
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
        leftover = LEFTOVER.fullmatch(path.name)
        if leftover and leftover[2] == "old":
            restore_interrupted(folder / leftover[1])
        elif leftover and path.is_dir():
            shutil.rmtree(path)
        elif leftover:
            path.unlink()


def _copy_permissions(folder: Path) -> None:
    """Gives the files in a folder the folder's permissions: safetensors creates files that only their owner can read."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o777 != mode:
            path.chmod(mode)


def _rename(source: Path, final: Path) -> None:
    os.replace(source, final)
    fsync(final.parent)

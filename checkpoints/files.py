"""Writing so that a crash leaves the old or the new, never a part.

.NAME.part      being written, or on its way out; whatever a crash leaves of it goes with the next save
.NAME.old       being replaced; goes back to its place if a crash left nothing there
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
from pathlib import Path

from sage.files import fsync, fsync_tree

logger = logging.getLogger(__name__)
LEFTOVER = re.compile(r"\.(.+)\.(part|old)")


def replace_folder(part: Path, final: Path) -> None:
    """Puts a finished folder in the place of an older one.

    Where the file system can exchange two names at once, a reader finds the one or the other at any time. Elsewhere a crash
    between two renames leaves the older one beside its place, where `settle` finds it.
    """
    settle(final)
    share(part)
    fsync_tree(part)
    if final.exists() and exchange(part, final):
        fsync(final.parent)
        shutil.rmtree(part)
        return
    if final.exists():
        sync_rename(final, old_of(final))
    sync_rename(part, final)
    shutil.rmtree(old_of(final), ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one operation; False where system or file system cannot."""
    try:
        swap = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    here = ctypes.c_int(-100)  # AT_FDCWD: relative paths count from the working directory
    first, second = (ctypes.c_char_p(os.fsencode(path)) for path in (one, other))
    return bool(swap(here, first, here, second, ctypes.c_uint(2)) == 0)  # RENAME_EXCHANGE


def settle(final: Path) -> None:
    """Undoes what a crash in the middle of `replace_folder` left: the older folder goes back if there is no newer one."""
    old = old_of(final)
    if old.exists() and not final.exists():
        logger.warning("%s: a replacement was interrupted; the older folder is back in its place", final)
        sync_rename(old, final)
    shutil.rmtree(old, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Clears away what a crash left directly in `folder`: parts are removed, interrupted replacements are settled.

    Only the process that writes there may call it.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        found = LEFTOVER.fullmatch(path.name)
        if found and found.group(2) == "old":
            settle(folder / found.group(1))
        elif found and path.is_dir():
            shutil.rmtree(path)
        elif found:
            path.unlink()


def part_of(final: Path) -> Path:
    """`.NAME.part`, where something is written before it is whole."""
    return final.with_name(f".{final.name}.part")


def old_of(final: Path) -> Path:
    """`.NAME.old`, where a folder waits while it is replaced."""
    return final.with_name(f".{final.name}.old")


def sync_rename(part: Path, final: Path) -> None:
    """Renames and makes the new name durable."""
    os.replace(part, final)
    fsync(final.parent)


def share(folder: Path) -> None:
    """Gives the files in a folder the permissions of the folder.

    safetensors writes for the owner alone, and who serves a draft is often somebody else.
    """
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o777 != mode:
            path.chmod(mode)


def remove_folder(folder: Path) -> None:
    """Removes a folder in such a way that a crash does not leave half of it under its name."""
    part = part_of(folder)
    os.replace(folder, part)
    shutil.rmtree(part)

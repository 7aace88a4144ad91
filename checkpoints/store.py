"""Checkpoints of a run, to resume from, and the atomic replacement of folders, by which drafts and exports are written too.

    state/
      step_00000100/          everything needed to resume
        manifest.json         size and hash of every file (sage.io.manifest)
        ...
      latest                  name of the newest complete state
      best                    name of the state of the best draft, if one was saved at that step
      .NAME.part              being written or being removed; a leftover of a crash is deleted before the next save
      .NAME.old               being replaced; restored if a crash left nothing in its place

After a crash the old folder or the new one is in place, never a mixture. Atomic writes of single files are in sage.io.files,
the content of a state is in train.state.resume. Imports torch only to read and write tensors.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from checkpoints.run_folder import list_steps, step_name
from sage.commands.cli import EXIT_CRASH
from sage.io.files import fsync, fsync_tree, write_text
from sage.io.manifest import MANIFEST, CorruptFolder, verify_manifest, write_manifest

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

LATEST, BEST = "latest", "best"
LEFTOVER = re.compile(r"\.(.+)\.(part|old)")


# -- folders -----------------------------------------------------------------------------------------------------------


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


# -- tensors -----------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes tensors from any device; tensors that share memory are copied. Raises OSError if it could not be written."""
    from safetensors.torch import save_file

    copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    try:
        save_file(copies, path, metadata=dict(metadata or {}))
    except SafetensorError as error:  # raised for a full disk
        raise OSError(f"{path.name}: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a file to the CPU; raises ValueError if the file is missing or not a safetensors file."""
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error


# -- states ------------------------------------------------------------------------------------------------------------


class SaveFailed(RuntimeError):
    """A write failed. The message names the place, the cause, what is still saved and the remedy."""

    exit_code = EXIT_CRASH


@contextmanager
def saving(path: Path, then: str = "go on with run.resume=true") -> Iterator[None]:
    """Reports a failed write to `path`, or below it, as `SaveFailed`; `then` is what to do once there is space."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise SaveFailed(f"{path}: could not be saved ({error}); free space or repair that folder, then {then}") from error


class StateStore:
    """The states of one run. One process (rank 0) begins, commits and prunes; any process may read.

    Args:
        folder: `runs/NAME/state`; created when needed.
        keep_last: number of newest states that are kept.
        keep_every: states of steps that are a multiple of this are kept as well; 0: none.
    """

    def __init__(self, folder: Path, keep_last: int = 2, keep_every: int = 0) -> None:
        self.folder = folder
        self.keep_last, self.keep_every = keep_last, keep_every

    def begin(self, step: int) -> Path:
        """Creates an empty folder for the state of `step`; removes leftovers of a crash first."""
        remove_leftovers(self.folder)
        part = self.part(step)
        part.mkdir(parents=True)
        return part

    def part(self, step: int) -> Path:
        """Returns the temporary folder of a state that is being written."""
        return part_path(self.folder / step_name(step))

    def commit(self, step: int, best_step: int | None = None) -> Path:
        """Completes what was written since `begin(step)`: manifest, fsync, rename, `latest`, `best`, retention.

        States of later steps are removed: they are corrupt, since the run was resumed from an earlier one. A state of
        `best_step`, that of the best draft so far, is kept. OSError leaves earlier states unchanged.
        """
        part, final = self.part(step), self.folder / step_name(step)
        write_manifest(part, step)
        replace_folder(part, final)
        write_text(self.folder / LATEST, final.name + "\n")
        if best_step in self.steps():
            assert best_step is not None
            write_text(self.folder / BEST, step_name(best_step) + "\n")
        self._prune(step, best_step)
        return final

    def abandon(self, step: int, cause: str) -> SaveFailed:
        """Removes a partial state, which frees space on a full disk; returns the error to raise."""
        shutil.rmtree(self.part(step), ignore_errors=True)
        steps = self.steps()
        left = f"step {steps[-1]} is saved; then go on with run.resume=true" if steps else "no earlier step is saved"
        return SaveFailed(f"{self.folder}: step {step} could not be saved ({cause}); free space or repair that folder. {left}")

    def steps(self) -> list[int]:
        """Returns the steps of the complete states in ascending order, without verifying them."""
        return list_steps(self.folder)

    def newest(self) -> Path | None:
        """Returns the newest state that agrees with its manifest; None if no state was saved.

        A corrupt state is reported in a warning, and the previous one is used.

        Raises:
            CorruptFolder: all states are corrupt.
        """
        problems = []
        for step in reversed(self.steps()):
            folder = self.folder / step_name(step)
            try:
                verify_state(folder)
            except CorruptFolder as error:
                problems.append(str(error))
                logger.warning("%s; using the previous state", error)
            else:
                return folder
        if problems:
            raise CorruptFolder(f"{problems[0]}; all other states are corrupt too; start again with another run.dir")
        return None

    def _prune(self, step: int, best_step: int | None) -> None:
        earlier = [saved for saved in self.steps() if saved <= step]
        kept = {best_step, *earlier[-self.keep_last :]}
        for saved in self.steps():
            is_due = self.keep_every > 0 and saved % self.keep_every == 0
            if saved > step or (saved not in kept and not is_due):
                removed = part_path(self.folder / step_name(saved))  # a crash leaves no partial folder under the state's name
                os.replace(self.folder / step_name(saved), removed)
                shutil.rmtree(removed)


def verify_state(folder: Path) -> dict[str, Any]:
    """Compares a state with its manifest and folder name; returns the manifest. CorruptFolder names what differs."""
    manifest = verify_manifest(folder)
    if folder.name != step_name(manifest["step"]):  # no file's hash depends on the step
        raise CorruptFolder(f"{folder / MANIFEST}: corrupt: step {manifest['step']} in the folder {folder.name}")
    return manifest

"""Checkpoints of a run, to resume from: written atomically, verified when read, the oldest ones removed.

    state/
      step_00000100/          everything needed to resume
        manifest.json         size and hash of every file (sage.io.manifest)
        ...
      latest                  name of the newest complete state
      best                    name of the state of the best draft, if one was saved at that step

Owns: names, retention, errors of a failed write. Does not own: atomic writing (sage.io.files, checkpoints.files), the content
of a state (train.state.resume).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from checkpoints.files import part_path, remove_folder, remove_leftovers, replace_folder
from checkpoints.run_folder import list_steps, step_name
from sage.commands.cli import EXIT_CRASH
from sage.io.files import write_text
from sage.io.manifest import MANIFEST, CorruptFolder, verify_manifest, write_manifest

logger = logging.getLogger(__name__)

LATEST, BEST = "latest", "best"


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
        """Creates an empty folder for the state of `step`; removes leftovers of a crash first.

        Raises:
            OSError: the folder is not writable.
        """
        remove_leftovers(self.folder)
        part = self.part(step)
        part.mkdir(parents=True)
        return part

    def part(self, step: int) -> Path:
        """Returns the temporary folder of a state that is being written."""
        return part_path(self.folder / step_name(step))

    def commit(self, step: int, best_step: int | None = None) -> Path:
        """Completes what was written since `begin(step)`: manifest, fsync, rename, `latest`, `best`, retention.

        States of later steps are removed: they are corrupt, since the run was resumed from an earlier one.

        Args:
            best_step: step of the best draft so far; a state of that step is kept.

        Raises:
            OSError: the disk is full or not writable; earlier states are unchanged.
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
                remove_folder(self.folder / step_name(saved))


def verify_state(folder: Path) -> dict[str, Any]:
    """Compares a state with its manifest and with the step in its folder's name; returns the manifest.

    Raises:
        CorruptFolder: names the file that differs.
    """
    manifest = verify_manifest(folder)
    if folder.name != step_name(manifest["step"]):  # no file's hash depends on the step
        raise CorruptFolder(f"{folder / MANIFEST}: corrupt: step {manifest['step']} in the folder {folder.name}")
    return manifest

"""Checkpoints of a run, to resume from.

    state/
      step_00000100/          everything needed to resume
        manifest.json         size and hash of every file (sage.io.manifest)
        ...
      latest                  name of the newest complete state

Folders are replaced by sage.io.folders, which describes the temporary names; the content of a state is in train.state.resume.
Imports torch only to read and write tensors.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from checkpoints.run_folder import list_steps, step_name
from sage.commands.cli import EXIT_CRASH
from sage.io.files import write_text
from sage.io.folders import part_path, remove_leftovers, replace_folder
from sage.io.manifest import MANIFEST, CorruptFolder, verify_manifest, write_manifest

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

LATEST = "latest"


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
        """Completes what was written since `begin(step)`: manifest, fsync, rename, `latest`, retention.

        States of later steps are removed: they are corrupt, since the run was resumed from an earlier one. A state of
        `best_step`, that of the best draft so far, is kept. OSError leaves earlier states unchanged.
        """
        part, final = self.part(step), self.folder / step_name(step)
        write_manifest(part, step)
        replace_folder(part, final)
        write_text(self.folder / LATEST, final.name + "\n")
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

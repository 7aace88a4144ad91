"""Run states on disk: whole or not there, verified when read, the oldest ones let go.

    state/
      step_00000100/          everything `resume` needs
        manifest.json         {"step": 100, "files": {NAME: {"bytes": n, "sha256": hex}}}
        ...
      latest                  the name of the newest whole state
      best                    the name of the state of the best draft, if one was saved at that step

Owns: names, hashes, retention, how a failed write is told. Does not own: atomic writing (checkpoints.files), what is inside a
state (train.state.resume).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from checkpoints.files import part_of, remove_folder, replace_folder, tidy
from checkpoints.run_folder import list_steps, step_name
from sage.cli import EXIT_CRASH
from sage.files import write_text
from sage.manifest import MANIFEST, CorruptFolder, verify_manifest, write_manifest

logger = logging.getLogger(__name__)

LATEST, BEST = "latest", "best"


class SaveFailed(RuntimeError):
    """A state could not be written; the message says where, why, what is still there and how to go on."""

    exit_code = EXIT_CRASH


@contextmanager
def saving(path: Path, then: str = "go on with run.resume=true") -> Iterator[None]:
    """Within the block a write to `path`, or below it, that fails is told in one line.

    Args:
        then: what to do once there is room.

    Raises:
        SaveFailed: in place of the error of system or library.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise SaveFailed(f"{path}: could not be saved ({error}); make room or repair that folder, then {then}") from error


class StateStore:
    """The states of one run. One process (rank 0) begins, commits and prunes; any process may read.

    Args:
        folder: `runs/NAME/state`; made when first needed.
        keep_last: how many of the newest states are kept.
        keep_every: states of steps that are a multiple of this are kept as well; 0: none.
    """

    def __init__(self, folder: Path, keep_last: int = 2, keep_every: int = 0) -> None:
        self.folder = folder
        self.keep_last, self.keep_every = keep_last, keep_every

    def begin(self, step: int) -> Path:
        """An empty folder to write the state of `step` into; what a crash left behind is cleared away first.

        Raises:
            OSError: the folder cannot be written to.
        """
        tidy(self.folder)
        part = self.part(step)
        part.mkdir(parents=True)
        return part

    def part(self, step: int) -> Path:
        """Where a state is written before it is whole."""
        return part_of(self.folder / step_name(step))

    def commit(self, step: int, best_step: int | None = None) -> Path:
        """Seals what was written since `begin(step)`: manifest, fsync, rename, `latest`, `best`, retention.

        States of later steps go: the run was resumed from before them because they are damaged.

        Args:
            best_step: where the best draft so far was found; a state of that step is kept.

        Raises:
            OSError: the disk is full or not writable; earlier states are untouched.
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
        """Removes a half-written state, so that a full disk has room again; -> the error to raise, in a person's words."""
        shutil.rmtree(self.part(step), ignore_errors=True)
        steps = self.steps()
        left = f"step {steps[-1]} is saved; then go on with run.resume=true" if steps else "nothing was saved before"
        return SaveFailed(f"{self.folder}: step {step} could not be saved ({cause}); make room or repair that folder. {left}")

    def steps(self) -> list[int]:
        """Steps of the complete states, oldest first; not verified."""
        return list_steps(self.folder)

    def newest(self) -> Path | None:
        """The newest state that is whole; None where there is none yet.

        A damaged state is named in a warning and the one before it is used.

        Raises:
            CorruptFolder: there are states and every one of them is damaged.
        """
        problems = []
        for step in reversed(self.steps()):
            folder = self.folder / step_name(step)
            try:
                verify_state(folder)
            except CorruptFolder as error:
                problems.append(str(error))
                logger.warning("%s; going back to the state before it", error)
            else:
                return folder
        if problems:
            raise CorruptFolder(f"{problems[0]}; no other state is whole; start again with another run.dir")
        return None

    def _prune(self, step: int, best_step: int | None) -> None:
        earlier = [known for known in self.steps() if known <= step]
        kept = {best_step, *earlier[-self.keep_last :]}
        for known in self.steps():
            is_due = self.keep_every > 0 and known % self.keep_every == 0
            if known > step or (known not in kept and not is_due):
                remove_folder(self.folder / step_name(known))


def verify_state(folder: Path) -> dict[str, Any]:
    """Compares a state with its manifest and its folder's name; returns the manifest.

    Raises:
        CorruptFolder: names the file that differs.
    """
    manifest = verify_manifest(folder)
    if folder.name != step_name(manifest["step"]):  # the step is in no file's hash
        raise CorruptFolder(f"{folder / MANIFEST}: corrupt: step {manifest['step']} in the folder {folder.name}")
    return manifest

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

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from checkpoints.files import part_of, remove_folder, replace_folder, sync_tree, tidy
from sage.cli import EXIT_CRASH
from sage.files import write_text

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
STEP_NAME = re.compile(r"step_(\d{8})")


class BadState(ValueError):
    """A folder that is not what its manifest says."""


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
        if not self.folder.is_dir():
            return []
        found = (STEP_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def newest(self) -> Path | None:
        """The newest state that is whole; None where there is none yet.

        A damaged state is named in a warning and the one before it is used.

        Raises:
            BadState: there are states and every one of them is damaged.
        """
        problems = []
        for step in reversed(self.steps()):
            folder = self.folder / step_name(step)
            try:
                verify(folder)
            except BadState as error:
                problems.append(str(error))
                logger.warning("%s; going back to the state before it", error)
            else:
                return folder
        if problems:
            raise BadState(f"{problems[0]}; no other state is whole; start again with another run.dir")
        return None

    def _prune(self, step: int, best_step: int | None) -> None:
        earlier = [known for known in self.steps() if known <= step]
        kept = {best_step, *earlier[-self.keep_last :]}
        for known in self.steps():
            is_due = self.keep_every > 0 and known % self.keep_every == 0
            if known > step or (known not in kept and not is_due):
                remove_folder(self.folder / step_name(known))


def step_name(step: int) -> str:
    """`step_00000100`."""
    return f"step_{step:08d}"


# -- sealed folders -----------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, step: int) -> None:
    """Lists every file of `folder` with size and hash, each flushed to the disk first."""
    sync_tree(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    files = {path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths}
    write_text(folder / MANIFEST, _manifest_text({"step": step, "files": files}))


def verify(folder: Path) -> dict[str, Any]:
    """Compares every file of a sealed folder, the manifest included, with what was sealed.

    Returns:
        the manifest.

    Raises:
        BadState: names the folder, the file and what is wrong with it.
    """
    manifest = read_manifest(folder)
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise BadState(f"{folder}: {name} is missing, its {MANIFEST} lists it")
        if path.stat().st_size != facts["bytes"]:
            raise BadState(f"{folder}: {name} has {path.stat().st_size} bytes, its {MANIFEST} says {facts['bytes']}")
        try:
            is_same = sha256(path) == facts["sha256"]
        except OSError as error:
            raise BadState(f"{folder}: {name} cannot be read ({error.strerror})") from error
        if not is_same:
            raise BadState(f"{folder}: {name} is damaged, its content is not what its {MANIFEST} says")
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """A manifest whose form is right and whose names stay inside `folder`; the files themselves are not looked at.

    Raises:
        BadState: names what is wrong with it.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        manifest = json.loads(text)
    except OSError as error:
        raise BadState(f"{folder}: {MANIFEST} is missing") from error
    except ValueError as error:
        raise BadState(f"{path}: damaged, not a manifest any more") from error
    if not _has_manifest_form(manifest):
        raise BadState(f"{path}: damaged, not a manifest any more")
    for name in manifest["files"]:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise BadState(f"{path}: names {name!r}, which leads out of the folder")
    # A byte may also flip where JSON does not care: the manifest must be the very text that is written for its content.
    if text != _manifest_text(manifest):
        raise BadState(f"{path}: damaged, not the text that was written")
    named = STEP_NAME.fullmatch(folder.name)  # no file's hash depends on the step, so it is held against the folder's name
    if named and int(named.group(1)) != manifest["step"]:
        raise BadState(f"{path}: damaged, step {manifest['step']} in a folder of step {int(named.group(1))}")
    return dict(manifest)


def _has_manifest_form(manifest: Any) -> bool:
    if not isinstance(manifest, dict) or set(manifest) != {"step", "files"} or not isinstance(manifest["files"], dict):
        return False
    facts = manifest["files"].values()
    return type(manifest["step"]) is int and all(isinstance(f, dict) and set(f) == {"bytes", "sha256"} for f in facts)


def _manifest_text(manifest: dict[str, Any]) -> str:
    return json.dumps(manifest, indent=1) + "\n"


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

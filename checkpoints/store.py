"""Run states on disk: whole or not there, verified when read, the oldest ones let go.

    state/
      step_00000100/          everything `resume` needs; written as .step_00000100.part and renamed when complete
        manifest.json         {"step": 100, "files": {NAME: {"bytes": n, "sha256": hex}}}
        ...
      latest                  the name of the newest whole state

Owns: names, atomicity, hashes, retention. Does not own: what is inside a state (train.resume).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LATEST = "latest"
STEP_NAME = re.compile(r"step_(\d{8})")


class BadState(ValueError):
    """A state that is not what its manifest says."""


class StateStore:
    """The states of one run. One process (rank 0) begins, commits and prunes; any process may read.

    Args:
        folder: `runs/NAME/state`; made when first needed.
        keep_last: how many whole states are kept.
    """

    def __init__(self, folder: Path, keep_last: int = 2) -> None:
        self.folder = folder
        self.keep_last = keep_last

    def begin(self, step: int) -> Path:
        """An empty folder to write the state of `step` into; leftovers of a crash under that name are removed."""
        part = self.part(step)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        return part

    def part(self, step: int) -> Path:
        """Where a state is written before it is whole."""
        return self.folder / f".{step_name(step)}.part"

    def commit(self, step: int) -> Path:
        """Seals what was written since `begin(step)`: manifest, fsync, rename, `latest`, retention.

        Raises:
            OSError: the disk is full or not writable; earlier states are untouched.
        """
        part, final = self.part(step), self.folder / step_name(step)
        write_manifest(part, step)
        if final.exists():
            shutil.rmtree(final)
        sync_rename(part, final)
        write_text(self.folder / LATEST, final.name + "\n")
        self._prune()
        return final

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
        steps = self.steps()
        problems = []
        for step in reversed(steps):
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

    def _prune(self) -> None:
        for step in self.steps()[: -self.keep_last]:
            shutil.rmtree(self.folder / step_name(step))


def step_name(step: int) -> str:
    """`step_00000100`."""
    return f"step_{step:08d}"


def write_manifest(folder: Path, step: int) -> None:
    """Lists every file of `folder` with size and hash, each flushed to the disk first."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        _fsync(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    write_text(folder / MANIFEST, json.dumps({"step": step, "files": files}, indent=1) + "\n")


def verify(folder: Path) -> dict[str, Any]:
    """Reads a manifest and compares every file with it.

    Raises:
        BadState: names the folder, the file and what is wrong with it.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadState(f"{folder}: {MANIFEST} is missing or unreadable") from error
    for name, facts in files.items():
        path = folder / name
        if not path.is_file():
            raise BadState(f"{folder}: {name} is missing")
        if path.stat().st_size != facts["bytes"]:
            raise BadState(f"{folder}: {name} has {path.stat().st_size} bytes, its manifest says {facts['bytes']}")
        if sha256(path) != facts["sha256"]:
            raise BadState(f"{folder}: {name} is damaged, its content is not what its manifest says")
    return dict(manifest)


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    _fsync(part)
    sync_rename(part, path)


def replace_folder(part: Path, final: Path) -> None:
    """Puts a finished folder in the place of an older one; a crash in between leaves one of the two under its name."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    for path in part.rglob("*"):
        if path.is_file():
            _fsync(path)
    if final.exists():
        final.rename(old)
    sync_rename(part, final)
    shutil.rmtree(old, ignore_errors=True)


def sync_rename(part: Path, final: Path) -> None:
    """Renames and makes the new name durable."""
    os.replace(part, final)
    _fsync(final.parent)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Manifests: the size and sha256 of every file of a folder, written last and verified before the folder is used.

manifest.json: {"step": 100, "files": {NAME: {"bytes": n, "sha256": hex}}}
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Any

from sage.io.files import fsync_tree, write_text

MANIFEST = "manifest.json"


class CorruptFolder(ValueError):
    """A folder that differs from its manifest. The message names the file and the difference."""


def has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def write_manifest(folder: Path, step: int) -> None:
    """Flushes every file of `folder`, trained for `step` optimizer steps, to disk and lists it with size and hash."""
    fsync_tree(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    files = {path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths}
    write_text(folder / MANIFEST, _manifest_text({"step": step, "files": files}))


def verify_manifest(folder: Path) -> dict[str, Any]:
    """Compares every file of a folder with its manifest, which is returned; CorruptFolder for the first difference."""
    manifest = read_manifest(folder)
    for name, listed in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CorruptFolder(f"{path}: missing, but listed in {MANIFEST}")
        if path.stat().st_size != listed["bytes"]:
            raise CorruptFolder(f"{path}: corrupt: {path.stat().st_size} bytes, {listed['bytes']} in {MANIFEST}")
        try:
            is_same = sha256(path) == listed["sha256"]
        except OSError as error:
            raise CorruptFolder(f"{path}: cannot be read ({error.strerror})") from error
        if not is_same:
            raise CorruptFolder(f"{path}: corrupt: its sha256 differs from the one in {MANIFEST}")
    return manifest


def refuse_corrupt_draft(folder: Path) -> None:
    """Verifies a draft's folder, if it has a manifest, before loading; raises CorruptFolder with the remedy."""
    if has_manifest(folder):
        try:
            verify_manifest(folder)
        except CorruptFolder as error:
            raise CorruptFolder(f"draft: {error}; save or copy the draft again") from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads a manifest; CorruptFolder if it is missing, not byte for byte as written, or lists a path outside `folder`."""
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        manifest = json.loads(text)
    except OSError as error:
        raise CorruptFolder(f"{path}: missing") from error
    except ValueError as error:
        raise CorruptFolder(f"{path}: corrupt: not JSON") from error
    files: Any = manifest.get("files") if isinstance(manifest, dict) and manifest.keys() == {"step", "files"} else None
    is_listed = isinstance(files, dict) and all(isinstance(f, dict) and set(f) == {"bytes", "sha256"} for f in files.values())
    if not is_listed or type(manifest["step"]) is not int:
        raise CorruptFolder(f"{path}: corrupt: not a manifest")
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise CorruptFolder(f"{path}: lists {name!r}, a path outside the folder")
    # A flipped byte can leave the JSON equivalent (white space): the text itself is compared as well.
    if text != _manifest_text(manifest):
        raise CorruptFolder(f"{path}: corrupt: not the text that was written")
    return dict(manifest)


def sha256(path: Path) -> str:
    """Returns the hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_text(manifest: dict[str, Any]) -> str:
    return json.dumps(manifest, indent=1) + "\n"

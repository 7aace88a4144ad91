"""An export is on disk whole or not at all: written beside its place, flushed, sealed with hashes, renamed.

    .NAME.part    being written; left by a crash, removed by the next attempt
    .NAME.old     what `overwrite` is replacing; put back if a crash left nothing under NAME
    NAME          whole

Owns: the folder's fate, and finding damage in a sealed folder. Does not own: what is in it.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from checkpoints.export.facts import read_json
from checkpoints.store import MANIFEST, BadState, sync_rename, verify, write_manifest

logger = logging.getLogger(__name__)

ABOUT = "sage_export.json"  # what the export is, for people, for `--inspect` and for importing it again


class Damaged(ValueError):
    """A file of a sealed folder is not what was sealed; the message names the file."""


@contextmanager
def writing(out: Path, step: int, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write into; sealed and put in its place when the block ends, removed when it fails.

    Args:
        out: the final folder.
        step: optimizer steps behind what is written, for the manifest.
        overwrite: replace an existing export; anything else under that name is never touched.

    Raises:
        ValueError: something is there already.
    """
    settle(out)
    _refuse_existing(out, overwrite)
    part = _part(out)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        write_manifest(part, step)
        _replace(part, out)
    except Exception:
        settle(out)
        shutil.rmtree(part, ignore_errors=True)
        raise


def settle(out: Path) -> None:
    """Undoes what a crash in the middle of a replacement left: the older folder goes back if there is no newer one."""
    old = _old(out)
    if old.exists() and not out.exists():
        logger.warning("%s: a replacement was interrupted; the older folder is back in its place", out)
        sync_rename(old, out)
    shutil.rmtree(old, ignore_errors=True)


def _refuse_existing(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST).is_file():
        raise ValueError(f"--out {out}: exists and was not written by sage-export; give another folder")
    if not overwrite:
        raise ValueError(f"--out {out}: exists; give another folder, or --overwrite to replace it")


def _replace(part: Path, out: Path) -> None:
    if out.exists():
        sync_rename(out, _old(out))
    sync_rename(part, out)
    shutil.rmtree(_old(out), ignore_errors=True)


def _part(out: Path) -> Path:
    return out.with_name(f".{out.name}.part")


def _old(out: Path) -> Path:
    return out.with_name(f".{out.name}.old")


def is_sealed(folder: Path) -> bool:
    """Whether the folder claims to be whole."""
    return (folder / MANIFEST).is_file()


def find_damage(folder: Path) -> None:
    """Compares every file of a sealed folder, the manifest included, with what was sealed.

    Raises:
        Damaged: names the file.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        manifest = json.loads(text)
        listed = sorted(manifest["files"])
        is_whole = set(manifest) == {"step", "files"} and all(set(f) == {"bytes", "sha256"} for f in manifest["files"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path}: damaged, not a manifest any more") from error
    for name in listed:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise Damaged(f"{path}: names {name!r}, which leads out of the folder")
    # A byte may also flip where JSON does not care: the manifest must be the very text that is written for its content.
    if not is_whole or text != json.dumps(manifest, indent=1) + "\n":
        raise Damaged(f"{path}: damaged, not the text that was written")
    try:
        verify(folder)
    except BadState as error:
        raise Damaged(str(error)) from error
    _compare_step(folder, manifest["step"])


def _compare_step(folder: Path, step: object) -> None:
    """The one number in a manifest that no file's hash depends on is also written in the sealed description."""
    written = read_json(folder / ABOUT).get("step") if (folder / ABOUT).is_file() else step
    if written != step:
        raise Damaged(f"{folder / MANIFEST}: damaged, step {step} where {ABOUT} says {written}")

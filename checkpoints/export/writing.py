"""An export is on disk whole or not at all: written beside its place, flushed, sealed with hashes, renamed.

    .NAME.part    being written; left by a crash, removed by the next attempt
    .NAME.old     what `overwrite` is replacing; put back if a crash left nothing under NAME
    NAME          whole

Owns: the folder's fate, and finding damage in a sealed folder. Does not own: what is in it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from checkpoints.export.facts import read_json
from checkpoints.files import part_of, replace_folder, settle
from sage.manifest import MANIFEST, CorruptFolder, verify_manifest, write_manifest

ABOUT = "sage_export.json"  # what the export is, for people, for `--inspect` and for importing it again


@contextmanager
def writing(out: Path, step: int, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write into; sealed and put in its place when the block ends, removed when it fails.

    Args:
        out: the final folder.
        step: optimizer steps behind what is written, for the manifest.
        overwrite: replace an existing export; anything else under that name is never touched.

    Raises:
        ValueError: something is there already.
        OSError: the disk is full, or not to be written to; nothing new is left there.
    """
    settle(out)
    _refuse_existing(out, overwrite)
    part = part_of(out)
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        yield part
        write_manifest(part, step)
        replace_folder(part, out)
    except Exception as error:
        settle(out)
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)):  # the latter is what safetensors makes of a full disk
            raise OSError(f"--out {out}: could not be written ({error}); nothing new was left there") from error
        raise


def _refuse_existing(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST).is_file():
        raise ValueError(f"--out {out}: exists and was not written by sage-export; give another folder")
    if not overwrite:
        raise ValueError(f"--out {out}: exists; give another folder, or --overwrite to replace it")


def find_damage(folder: Path) -> None:
    """Compares every file of a sealed folder, the manifest included, with what was sealed.

    Raises:
        CorruptFolder: names the file.
    """
    _compare_step(folder, verify_manifest(folder)["step"])


def _compare_step(folder: Path, step: object) -> None:
    """The one number in a manifest that no file's hash depends on is also written in the sealed description."""
    written = read_json(folder / ABOUT).get("step") if (folder / ABOUT).is_file() else step
    if written != step:
        raise CorruptFolder(f"{folder / MANIFEST}: damaged, step {step} where {ABOUT} says {written}")

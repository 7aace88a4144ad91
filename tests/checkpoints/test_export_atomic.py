"""An export is complete or absent, wherever writing is interrupted; a corrupt file is named.

The faults of `new_folder`, by which an export is written, are those of test_store.py, at every system call.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.export_helpers import export_draft
from support.messages import refused

from checkpoints.export.folder import verify_export
from checkpoints.export.importer import check_folder
from checkpoints.store import restore_interrupted
from sage.io.manifest import CorruptFolder

NAMES = ("config.json", "model.safetensors", "sage_export.json", "README.md")


class Crash(BaseException):
    """Simulates the death of the process: no clean-up runs."""


def intact(folder: Path) -> bytes:
    """Returns the weights of an export without findings."""
    assert not check_folder(folder).findings
    verify_export(folder)
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("error", [Crash(), OSError(28, "No space left on device")], ids=["crash", "full disk"])
@pytest.mark.parametrize("step", ["save_file", "write_json", "check_folder", "check_reload", "render_card", "write_text"])
def test_an_interrupted_export_leaves_the_existing_one(
    exports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    draft, out = exports / "eagle3-draft", tmp_path / "place" / "out"
    old = intact(export_draft(draft, out, dtype=torch.float32).folder)

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(f"checkpoints.export.exporter.{step}", fail)
        export_draft(draft, out, overwrite=True)
    assert isinstance(error, Crash) or [path.name for path in out.parent.iterdir()] == ["out"]
    restore_interrupted(out)
    assert intact(out) == old
    assert intact(export_draft(draft, out, overwrite=True).folder) == intact(exports / "eagle3") != old
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(("left", "kept"), [([".out.old"], ".out.old"), ([".out.old", "out"], "out")])
def test_a_crash_between_two_renames_leaves_one_whole_folder(tmp_path: Path, left: list[str], kept: str) -> None:
    for name in left:
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(name)
    restore_interrupted(tmp_path / "out")
    assert (tmp_path / "out" / "name").read_text() == kept
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", NAMES)
def test_a_corrupt_file_is_named(exports: Path, tmp_path: Path, name: str) -> None:
    out = Path(shutil.copytree(exports / "eagle3", tmp_path / "out"))
    content = bytearray((out / name).read_bytes())
    content[30] ^= 1
    (out / name).write_bytes(content)
    assert f"{name}: corrupt" in str(check_folder(out).errors[0])
    (out / name).unlink()
    assert f"{name}: missing" in str(check_folder(out).errors[0])


def test_the_step_of_a_manifest_is_that_of_the_export(exports: Path, tmp_path: Path) -> None:
    """No file's hash depends on it."""
    out = Path(shutil.copytree(exports / "eagle3", tmp_path / "out"))
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | {"step": 7}, indent=1) + "\n")
    with refused("manifest.json: corrupt: step 7, 0 in", error=CorruptFolder):
        verify_export(out)

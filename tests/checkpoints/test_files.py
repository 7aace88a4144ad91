"""Atomic writes of single files, and JSON files (sage.io.files)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.messages import refused

from sage.io.files import atomic_path, read_json, write_json, write_text


def test_files_are_replaced_and_no_temporary_ones_are_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert read_json(path) == {"a": 2}
    assert [found.name for found in path.parent.iterdir()] == ["x.json"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    path = tmp_path / "x.txt"
    write_text(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["x.txt"]


def test_a_folder_is_renamed_when_the_block_ends(tmp_path: Path) -> None:
    for content in ("old", "new"):
        with atomic_path(tmp_path / "folder") as temporary:
            temporary.mkdir()
            (temporary / "x").write_text(content)
    assert (tmp_path / "folder" / "x").read_text() == "new"
    with pytest.raises(RuntimeError), atomic_path(tmp_path / "folder") as temporary:
        temporary.mkdir()
        raise RuntimeError
    assert (tmp_path / "folder" / "x").read_text() == "new"
    assert [found.name for found in tmp_path.iterdir()] == ["folder"]


def test_nan_is_not_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", float("nan"))
    assert not list(tmp_path.iterdir())


def test_unreadable_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with refused(str(path), "missing"):
        read_json(path)
    for content in (b"{", b"\xff", b"[]"):
        path.write_bytes(content)
        with refused(str(path), "JSON"):
            read_json(path)

"""Files (sage.io.files): atomic writes, JSON, locks, and write errors that name the output and leave no file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.messages import refused

from sage.io.files import (
    CannotWrite,
    atomic_path,
    check_writable,
    locked,
    naming_write_errors,
    read_json,
    write_json,
    write_text,
    writing,
)


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


FULL = OSError(28, "No space left on device")


def test_full_disk_names_the_output_and_leaves_no_file(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "rows.jsonl"
    for _ in range(2):
        with refused("rows.jsonl", "No space left on device", error=CannotWrite), writing(out) as temporary:
            temporary.write_text("half")
            raise FULL
    assert not list(out.parent.iterdir())
    with refused(str(tmp_path / "inner"), error=CannotWrite), writing(out), naming_write_errors(tmp_path / "inner"):
        raise FULL


def test_errors_of_other_files_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"), writing(tmp_path / "rows.jsonl"):
        Path("/gone/image.png").read_bytes()
    with pytest.raises(ValueError, match="bad row"), writing(tmp_path / "rows.jsonl"):
        raise ValueError("bad row")


def test_unwritable_output_is_refused_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b" / "page.html")
    assert not list(tmp_path.iterdir())
    for place in ("/proc/nowhere/page.html", str(tmp_path / "file" / "page.html")):
        (tmp_path / "file").write_text("")
        with refused(place, error=CannotWrite):
            check_writable(Path(place))
        with refused(place, error=CannotWrite), locked(Path(place)):
            raise AssertionError("locked")


def test_lock_is_released_after_an_error(tmp_path: Path) -> None:
    def use() -> Any:
        with locked(tmp_path / "x"):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            use()

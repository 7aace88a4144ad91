"""Locks, and write errors of a full or read-only disk: they name the output and leave no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.messages import refused

from sage.io.files import CannotWrite, check_writable, locked, naming_write_errors, writing

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

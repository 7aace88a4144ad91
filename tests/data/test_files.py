"""Writing that a full or unwritable disk interrupts: what is said, and what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_prep.files import CannotWrite, check_writable, locked, naming_write_errors, writing

FULL = OSError(28, "No space left on device")


def test_a_full_disk_names_the_place_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "rows.jsonl"
    for _ in range(2):
        said = r"rows\.jsonl: could not be written \(No space left on device\); free disk space"
        with pytest.raises(CannotWrite, match=said), writing(out) as temporary:
            temporary.write_text("half")
            raise FULL
    assert not list(out.parent.iterdir())
    with pytest.raises(CannotWrite, match=r"inner: could not"), writing(out), naming_write_errors(tmp_path / "inner"):
        raise FULL


def test_somebody_elses_file_is_not_blamed_on_the_output(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"), writing(tmp_path / "rows.jsonl"):
        Path("/gone/picture.png").read_bytes()
    with pytest.raises(ValueError, match="bad row"), writing(tmp_path / "rows.jsonl"):
        raise ValueError("bad row")


def test_what_cannot_be_written_is_known_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b" / "page.html")
    assert not list(tmp_path.iterdir())
    for place in ("/proc/nowhere/page.html", str(tmp_path / "file" / "page.html")):
        (tmp_path / "file").write_text("")
        with pytest.raises(CannotWrite, match=rf"{place}: could not be written"):
            check_writable(Path(place))
        with pytest.raises(CannotWrite, match=rf"{place}: could not be written"), locked(Path(place)):
            raise AssertionError("locked")


def test_a_lock_is_let_go(tmp_path: Path) -> None:
    def use() -> Any:
        with locked(tmp_path / "x"):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            use()

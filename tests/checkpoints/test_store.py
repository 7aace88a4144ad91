"""Files and states of a run: atomic folders, checksums, retention, faults of the disk."""

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.messages import check_message, refused

from checkpoints.store import StateStore, verify_state
from sage.io.files import CannotWrite, check_writable, locked, naming_write_errors, read_json, write_text, writing
from sage.io.manifest import CorruptFolder


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


def test_unwritable_output_is_refused_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b" / "page.html")
    assert not list(tmp_path.iterdir())
    for place in ("/proc/nowhere/page.html", str(tmp_path / "file" / "page.html")):
        (tmp_path / "file").write_text("")
        with refused(place, error=CannotWrite):
            check_writable(Path(place))
        with refused(place, error=CannotWrite), locked(Path(place)):
            raise AssertionError("locked")


ROOT = Path(__file__).parents[2]


def save(store: StateStore, step: int, content: str = "weights") -> Path:
    part = store.begin(step)
    (part / "deep").mkdir()
    (part / "a.bin").write_text(content)
    (part / "deep" / "b.bin").write_text(content * 2)
    return store.commit(step)


LISTED = {"bytes": 1, "sha256": "0"}


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest and writes it in the store's format."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def test_a_committed_state_is_the_latest_and_others_are_ignored(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state")
    assert store.newest() is None
    folder = save(store, 100)
    assert folder == tmp_path / "state" / "step_00000100" == store.newest()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 100 and set(manifest["files"]) == {"a.bin", "deep/b.bin"}
    assert manifest["files"]["deep/b.bin"]["bytes"] == 14
    assert (tmp_path / "state" / "latest").read_text() == "step_00000100\n"
    (store.begin(200) / "a.bin").write_text("half")
    assert store.newest() == folder
    assert list(store.begin(200).iterdir()) == []  # the next attempt starts clean


def test_files_get_the_permissions_of_their_folder(tmp_path: Path) -> None:
    """safetensors creates files that only their owner can read."""
    part = StateStore(tmp_path / "state").begin(1)
    (part / "deep").mkdir()
    for path in (part / "a.bin", part / "deep" / "b.bin"):
        path.touch(mode=0o600)
    part.chmod(0o750)
    folder = StateStore(tmp_path / "state").commit(1)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
    assert modes == {"a.bin": 0o640, "b.bin": 0o640, "manifest.json": 0o640}


def test_the_last_the_best_and_every_nth_state_are_kept(tmp_path: Path) -> None:
    store = StateStore(tmp_path, keep_last=2, keep_every=10)
    for step in range(1, 14):
        part = store.begin(step)
        (part / "a.bin").write_text("x")
        store.commit(step, best_step=None if step < 4 else 4)
        assert len(store.steps()) <= 4
    assert store.steps() == [4, 10, 12, 13]
    assert (tmp_path / "latest").read_text() == "step_00000013\n"


def test_later_corrupt_states_are_removed_by_the_next_save(tmp_path: Path) -> None:
    """Otherwise retention could remove the state that was just saved."""
    store = StateStore(tmp_path, keep_last=1, keep_every=9)
    save(store, 3)
    (save(store, 9) / "a.bin").write_text("?")
    assert save(store, 4) == store.newest()
    assert store.steps() == [4]


@pytest.mark.parametrize(
    ("corrupt", "parts"),
    [
        (lambda folder: (folder / "a.bin").unlink(), ("a.bin", "missing")),
        (lambda folder: (folder / "a.bin").write_text("shrt"), ("a.bin", "4 bytes", "7")),
        (lambda folder: (folder / "a.bin").write_text("WEIGHTS"), ("a.bin", "sha256")),
        (lambda folder: (folder / "manifest.json").write_text("{"), ("manifest.json", "not JSON")),
        (lambda folder: (folder / "manifest.json").unlink(), ("manifest.json", "missing")),
        (lambda folder: (folder / "manifest.json").write_text('{"files": 3, "step": 0}'), ("manifest.json", "not a manifest")),
        (lambda folder: edit(folder, lambda manifest: manifest["files"].update({"../../x": LISTED})), ("../../x",)),
        (lambda folder: edit(folder, lambda manifest: manifest.update(step=3)), ("step 3", "step_00000002")),
    ],
)
def test_corrupt_state_is_named_and_the_previous_one_is_used(tmp_path, caplog, corrupt, parts):
    store = StateStore(tmp_path)
    good, bad = save(store, 1), save(store, 2)
    corrupt(bad)
    with refused(*parts, error=CorruptFolder):
        verify_state(bad)
    with caplog.at_level(logging.WARNING):
        assert store.newest() == good
    check_message(caplog.messages[0], *parts, "using the previous state")
    (good / "a.bin").unlink()
    with refused("run.dir", error=CorruptFolder):
        store.newest()


def test_every_flipped_byte_is_found_and_the_file_named(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    folder = save(store, 3)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        original = path.read_bytes()
        for position in range(len(original)):
            flipped = bytearray(original)
            flipped[position] ^= 1
            path.write_bytes(flipped)
            with pytest.raises(CorruptFolder) as caught:
                verify_state(folder)
            assert path.name in str(caught.value), (path.name, position)
        path.write_bytes(original)
    verify_state(folder)


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder in memory, if available: thousands of flushes to a disk take minutes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.mark.slow
def test_a_fault_at_any_write_leaves_a_complete_state(memory_folder: Path) -> None:
    """The process is killed, or the disk is full, before, during and after each write, flush and rename (store_faults.py)."""
    script = [sys.executable, ROOT / "tests/support/store_faults.py", memory_folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert len(counts) == 7 and all(int(count) > 40 for count in counts.values()), counts

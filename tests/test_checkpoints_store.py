"""States are whole or not there, and damage is found when read."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from checkpoints.store import BadState, StateStore, replace_folder, verify, write_text


def save(store: StateStore, step: int, content: str = "weights") -> Path:
    part = store.begin(step)
    (part / "deep").mkdir()
    (part / "a.bin").write_text(content)
    (part / "deep" / "b.bin").write_text(content * 2)
    return store.commit(step)


def test_a_committed_state_is_listed_hashed_and_named_latest(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state")
    folder = save(store, 100)
    assert folder == tmp_path / "state" / "step_00000100"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 100
    assert set(manifest["files"]) == {"a.bin", "deep/b.bin"}
    assert manifest["files"]["deep/b.bin"]["bytes"] == 14
    assert (tmp_path / "state" / "latest").read_text() == "step_00000100\n"
    assert store.newest() == folder


def test_only_the_last_states_are_kept(tmp_path: Path) -> None:
    store = StateStore(tmp_path, keep_last=2)
    for step in (1, 2, 30):
        save(store, step)
    assert store.steps() == [2, 30]


def test_what_was_not_committed_does_not_exist(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    assert store.newest() is None
    good = save(store, 1)
    (store.begin(2) / "a.bin").write_text("half")
    assert store.newest() == good
    assert list(store.begin(2).iterdir()) == []  # the next attempt starts clean


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    save(store, 1, "old")
    assert (save(store, 1, "new") / "a.bin").read_text() == "new"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "a.bin").unlink(), "a.bin is missing"),
        (lambda folder: (folder / "a.bin").write_text("shrt"), "a.bin has 4 bytes, its manifest says 7"),
        (lambda folder: (folder / "a.bin").write_text("WEIGHTS"), "a.bin is damaged"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is missing or unreadable"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing or unreadable"),
    ],
)
def test_damage_is_named_and_the_state_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object, message: str
) -> None:
    store = StateStore(tmp_path)
    good, bad = save(store, 1), save(store, 2)
    assert callable(damage)
    damage(bad)
    with pytest.raises(BadState, match=message):
        verify(bad)
    checkpoints_logger = logging.getLogger("checkpoints")
    checkpoints_logger.propagate = True
    with caplog.at_level(logging.WARNING):
        assert store.newest() == good
    assert message in caplog.text


def test_nothing_whole_is_an_error(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    (save(store, 1) / "a.bin").unlink()
    with pytest.raises(BadState, match="no other state is whole"):
        store.newest()


def test_a_full_disk_leaves_the_last_state_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StateStore(tmp_path)
    good = save(store, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("checkpoints.store.write_manifest", full)
    with pytest.raises(OSError, match="No space left"):
        save(store, 2)
    assert store.newest() == good


def test_replacing_text_and_folders_leaves_no_parts(tmp_path: Path) -> None:
    write_text(tmp_path / "x.json", "1")
    write_text(tmp_path / "x.json", "2")
    for content in ("old", "new"):
        (tmp_path / "part").mkdir()
        (tmp_path / "part" / "w").write_text(content)
        replace_folder(tmp_path / "part", tmp_path / "draft")
    assert (tmp_path / "x.json").read_text() == "2"
    assert (tmp_path / "draft" / "w").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "x.json"]

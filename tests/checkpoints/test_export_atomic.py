"""An export is complete or absent, wherever writing is interrupted; a flipped byte in any of its files is found."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.export_helpers import export_draft, save_draft, save_target

from checkpoints import files
from checkpoints.export.checks import check_folder
from checkpoints.export.exporter import find_facts, load_trained
from checkpoints.export.folder import new_export, verify_export
from checkpoints.files import restore_interrupted
from sage.io.manifest import CorruptFolder

NAMES = ("config.json", "model.safetensors", "sage_export.json", "README.md")


class Crash(BaseException):
    """Simulates the death of the process: no clean-up runs."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    save_draft(folder / "draft", save_target(folder / "target"))
    return folder


@contextmanager
def failing(at: int, how: str) -> Iterator[list[str]]:
    """Makes the `at`-th disk operation fail: `before` it, in the `middle` (a partial file, or after a completed rename), or
    with a system `error`. Yields the operations so far."""
    done: list[str] = []

    def wrapped(name: str, operation: Callable[..., Any], halve: Callable[..., Any] | None) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            done.append(name)
            if len(done) != at:
                return operation(*arguments, **options)
            if how == "error":
                raise OSError(28, "No space left on device")
            if how == "middle":
                (halve or operation)(*arguments, **options)
            raise Crash

        return run

    def half_text(path: Path, content: str, *_: Any, **__: Any) -> None:
        path.write_bytes(content.encode()[: len(content) // 2])

    def half_tensors(tensors: dict[str, torch.Tensor], path: Path, **_: Any) -> None:
        path.write_bytes(b"\x10" * 999)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", wrapped("replace", os.replace, None))
        patch.setattr(files, "exchange", wrapped("exchange", files.exchange, None))
        patch.setattr(os, "fsync", wrapped("fsync", os.fsync, None))
        patch.setattr(Path, "mkdir", wrapped("mkdir", Path.mkdir, None))
        patch.setattr(Path, "write_text", wrapped("write_text", Path.write_text, half_text))
        patch.setattr("checkpoints.export.exporter.save_file", wrapped("save_file", save_file, half_tensors))
        patch.setattr(shutil, "rmtree", wrapped("rmtree", shutil.rmtree, None))
        yield done


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def intact(folder: Path) -> bytes:
    """Returns the weights of an export without findings."""
    check = check_folder(folder)
    assert not check.findings
    verify_export(folder)
    return weights(folder)


@pytest.fixture
def quick(home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches what an export reads and computes, which is the same for every interruption."""
    done = export_draft(home / "draft", tmp_path_factory.mktemp("once") / "out")
    trained = load_trained(home / "draft")
    facts = find_facts(trained.config, None)
    monkeypatch.setattr("checkpoints.export.exporter.load_trained", lambda _: trained)
    monkeypatch.setattr("checkpoints.export.exporter.find_facts", lambda *_: facts)
    monkeypatch.setattr("checkpoints.export.exporter.check_reload", lambda *_: done.rounding)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "can_exchange"), [("before", True), ("middle", True), ("error", True), ("before", False), ("middle", False)]
)
def test_interrupted_replacement(
    home: Path, tmp_path: Path, how: str, can_exchange: bool, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old export or the new one is in place, never a mixture. Each attempt starts with the leftovers of the previous one;
    the first attempt that completes leaves no leftovers."""
    if not can_exchange:  # a file system that cannot exchange two names
        monkeypatch.setattr(files, "exchange", lambda *_: False)
    out, kept = tmp_path / "place" / "out", tmp_path / "kept"
    old = intact(export_draft(home / "draft", kept, dtype=torch.float32).folder)
    new = intact(export_draft(home / "draft", tmp_path / "new").folder)
    shutil.copytree(kept, out)
    survivors: list[bytes] = []
    for at in range(1, 200):
        with failing(at, how) as done, suppress(Crash, OSError):
            export_draft(home / "draft", out, overwrite=True)
        if len(done) < at:
            break
        if how == "error":  # the process continues and cleans up
            assert [path.name for path in out.parent.iterdir()] == ["out"], done[-1]
        restore_interrupted(out)
        survivors.append(intact(out))
        assert survivors[-1] in (old, new), done[-1]
        shutil.rmtree(out)
        shutil.copytree(kept, out)
    assert {"replace", "exchange", "fsync", "mkdir", "write_text", "save_file", "rmtree"} <= set(done)
    assert (survivors[0], survivors[-1], intact(out)) == (old, new, new)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["before", "middle"])
def test_interrupted_first_export(home: Path, tmp_path: Path, how: str, quick: None) -> None:
    out = tmp_path / "deep" / "out"
    for at in range(1, 200):
        with failing(at, how) as done, suppress(Crash):
            export_draft(home / "draft", out)
        if len(done) < at:
            break
        restore_interrupted(out)
        if out.exists():
            intact(out)
            shutil.rmtree(out)
    assert at > 20
    assert intact(out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


class TestRestore:
    def folders(self, tmp_path: Path, *names: str) -> Path:
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / "x").write_text(name)
        return tmp_path / "out"

    def test_the_previous_folder_is_restored(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        out = self.folders(tmp_path, ".out.old")
        restore_interrupted(out)
        assert (out / "x").read_text() == ".out.old"
        assert "interrupted" in caplog.text

    def test_the_new_folder_is_kept(self, tmp_path: Path) -> None:
        out = self.folders(tmp_path, ".out.old", "out")
        restore_interrupted(out)
        assert (out / "x").read_text() == "out"
        assert not (tmp_path / ".out.old").exists()

    def test_a_failed_block_leaves_no_files(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError), new_export(tmp_path / "out", 0) as part:
            (part / "x").write_text("half")
            raise RuntimeError
        assert list(tmp_path.iterdir()) == []


class TestCorruption:
    @pytest.fixture
    def out(self, home: Path, tmp_path: Path) -> Path:
        return export_draft(home / "draft", tmp_path / "out").folder

    def flip(self, path: Path, position: int) -> bytes:
        content = path.read_bytes()
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(bytes(changed))
        return content

    @pytest.mark.slow
    def test_every_flipped_byte_is_found(self, out: Path) -> None:
        """Every byte of the manifest, and a sample of the bytes of the other files."""
        for name in (*NAMES, "manifest.json"):
            size = (out / name).stat().st_size
            for position in range(0, size, 1 if name == "manifest.json" else size // 30):
                content = self.flip(out / name, position)
                with pytest.raises(CorruptFolder) as caught:
                    verify_export(out)
                part = name if name == "manifest.json" else f"{name}: corrupt"
                assert part in str(caught.value), position
                (out / name).write_bytes(content)
        verify_export(out)

    @pytest.mark.parametrize("name", NAMES)
    def test_the_check_names_the_file(self, out: Path, name: str) -> None:
        self.flip(out / name, 30)
        assert f"{name}: corrupt" in str(check_folder(out).errors[0])
        (out / name).unlink()
        assert f"{name}: missing" in str(check_folder(out).errors[0])

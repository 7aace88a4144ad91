"""The folder of compiled passes: one process compiles, the others wait for it; what is not used is deleted."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import check_message
from support.pass_helpers import LayerPass

from sage.runtime import compiled as package
from sage.runtime import package_folder
from sage.runtime.package_folder import DAY_S, UNUSED_DAYS, mark_used, only_process, prune, writable_path


def new_package(folder: Path, name: str, age_days: float = 0.0, size: int = 10) -> Path:
    path = folder / f"{name}.pt2"
    path.write_bytes(b"x" * size)
    when = time.time() - age_days * DAY_S
    os.utime(path, (when, when))
    return path


def test_unused_packages_are_deleted(tmp_path: Path) -> None:
    kept, old, used = (new_package(tmp_path, name, age) for name, age in (("a", 1), ("b", UNUSED_DAYS + 1), ("c", 99)))
    other = tmp_path / "notes.txt"
    other.write_text("of the user")
    mark_used(used)
    prune(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([kept, used, other]) and not old.exists()


def test_least_recently_used_packages_are_deleted_beyond_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_folder, "MAX_BYTES", 25)
    paths = [new_package(tmp_path, name, age) for name, age in (("a", 3), ("b", 1), ("c", 2))]
    prune(tmp_path)
    assert [path.exists() for path in paths] == [False, True, True]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "passes").write_text("a file")
    with pytest.warns(UserWarning) as caught:
        path = writable_path(tmp_path / "passes" / "a.pt2")
    check_message(str(caught[0].message), "passes:", str(tmp_path / "passes"), "not kept")
    assert path.name == "a.pt2" and path.parent.is_dir()
    assert writable_path(tmp_path / "new" / "a.pt2") == tmp_path / "new" / "a.pt2"


def test_a_second_process_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, order = tmp_path / "a.pt2", []

    def second() -> None:
        with only_process(path, "a pass"):
            order.append("second")

    thread = threading.Thread(target=second)
    with only_process(path, "a pass"):
        thread.start()
        while "waiting" not in capsys.readouterr().err:
            time.sleep(0.01)
        order.append("first")
    thread.join()
    assert order == ["first", "second"] and not list(tmp_path.iterdir())


def test_what_another_process_has_compiled_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package appears between the first look and the lock."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    theirs, function = object(), LayerPass("model")
    answers: list[Any] = [None, theirs]
    monkeypatch.setattr(package, "_loaded", lambda *args: answers.pop(0))
    monkeypatch.setattr(package, "_newly_compiled", lambda *args: pytest.fail("compiled twice"))
    assert package.compiled(function, (), torch.device("cpu")) is theirs

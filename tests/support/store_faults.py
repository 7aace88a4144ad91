"""Saves and replaces states and drafts, with the process killed or the disk full at every write.

    python store_faults.py FOLDER

Imports only the store, so that a child process takes milliseconds. Prints the number of faults of each scenario.
"""

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from checkpoints.store import StateStore
from sage.io import folders as module
from sage.io.folders import remove_leftovers, restore_interrupted
from sage.io.manifest import verify_manifest, write_manifest

FILES = ("weight.bin", "deep/moments.bin")


class Faults:
    """Counts the moments before, during and after every write, and triggers a fault at the chosen one."""

    def __init__(self, chosen: int, trigger: Callable[[], None]) -> None:
        self.chosen, self.trigger, self.count = chosen, trigger, 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.chosen:
            self.trigger()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self()
            done = function(*args, **kwargs)
            self()
            return done

        return wrapped

    def write(self, path: Path, text: str) -> None:
        """Replaces `Path.write_text`, with a moment in the middle."""
        self()
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
            file.flush()
            self()
            file.write(text[len(text) // 2 :])
        self()


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def injected(faults: Faults) -> Iterator[None]:
    """Routes the store's system calls and the writing of a state's files through `faults`."""
    with ExitStack() as stack:
        for owner, name in ((os, "replace"), (os, "fsync"), (shutil, "rmtree"), (Path, "mkdir")):
            stack.enter_context(mock.patch.object(owner, name, faults.around(getattr(owner, name))))
        stack.enter_context(mock.patch.object(Path, "write_text", lambda path, content, **_: faults.write(path, content)))
        yield


def fill(folder: Path, label: str) -> None:
    (folder / "deep").mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).write_text(f"{name} {label} " * 50)


def content(folder: Path) -> str:
    """Returns the label that a folder was filled with; AssertionError for a mixture, CorruptFolder for other content."""
    verify_manifest(folder)
    (label,) = {(folder / name).read_text().split()[-1] for name in FILES}
    assert {path.name for path in folder.iterdir()} == {"weight.bin", "deep", "manifest.json"}
    return label


def save(folder: Path, step: int, label: str) -> None:
    store = StateStore(folder, keep_last=2, keep_every=100)
    try:
        fill(store.begin(step), label)
        store.commit(step, best_step=step)
    except OSError as error:
        store.abandon(step, str(error))
        raise


def make_draft(home: Path, label: str) -> None:
    with module.new_folder(home / "draft") as part:
        fill(part, label)
        write_manifest(part, 1)


# -- scenarios: (prepare, act, check) -----------------------------------------------------------------------------------


def prepare_states(home: Path) -> None:
    for step in (10, 20):
        save(home, step, f"at{step}")


def check_states(home: Path) -> None:
    """The newest state is one that was saved, and the next save leaves only complete states."""
    store = StateStore(home, keep_last=2)
    remove_leftovers(home)
    newest = store.newest()
    assert newest is not None
    assert content(newest) in {"step_00000025": ("at25",), "step_00000020": ("at20", "again")}[newest.name], newest
    save(home, 30, "at30")
    assert content(home / "step_00000030") == "at30" and (home / "latest").read_text() == "step_00000030\n"
    for path in home.iterdir():
        assert path.name == "latest" or verify_manifest(path), path


def check_draft(home: Path) -> None:
    if module.old_path(home / "draft").exists():
        restore_interrupted(home / "draft")
    assert content(home / "draft") in ("old", "new")
    make_draft(home, "newest")
    assert content(home / "draft") == "newest" and [path.name for path in home.iterdir()] == ["draft"]


def replace_in_two_steps(home: Path) -> None:
    """Replaces a draft as on a file system that cannot exchange names."""
    with mock.patch.object(module, "exchange", lambda *_: False):
        make_draft(home, "new")


Action = Callable[[Path], None]
SCENARIOS: dict[str, tuple[Action, Action, Action]] = {
    "another state": (prepare_states, lambda home: save(home, 25, "at25"), check_states),
    "the same step again": (prepare_states, lambda home: save(home, 20, "again"), check_states),
    "the draft": (lambda home: make_draft(home, "old"), lambda home: make_draft(home, "new"), check_draft),
    "the draft in two steps": (lambda home: make_draft(home, "old"), replace_in_two_steps, check_draft),
}


def killed(act: Action, home: Path, chosen: int) -> bool:
    """Runs `act` in a child process that is killed at the chosen moment; returns whether there was such a moment."""
    child = os.fork()
    if not child:
        with injected(Faults(chosen, lambda: os.kill(os.getpid(), signal.SIGKILL))):
            act(home)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def full(act: Action, home: Path, chosen: int) -> bool:
    try:
        with injected(Faults(chosen, fill_disk)):
            act(home)
    except OSError as error:
        assert error.errno == errno.ENOSPC
        return True
    return False


def main(folder: Path) -> None:
    for name, (prepare, act, check) in SCENARIOS.items():
        for way in (killed, full) if name != "the same step again" else (killed,):
            chosen, has_fault = 0, True
            while has_fault:
                chosen += 1
                home = folder / f"{name} {way.__name__} {chosen}"
                home.mkdir()
                prepare(home)
                has_fault = way(act, home, chosen)
                check(home)
            print(f"{name}: {way.__name__} {chosen - 1}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

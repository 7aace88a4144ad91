"""Folders and packages of this project, atomic writes, errors of a full disk, locks between processes, and JSON files.

A reader sees the old file or the new one: the content is written to `.NAME.PID.THREAD.part` beside its place, flushed to disk
and renamed. Importing this module imports the standard library only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
PACKAGES_DIR = Path(__file__).resolve().parents[2]  # contains `sage` and the packages beside it


def user_cache_dir() -> Path:
    """Returns `sage-draft` in $XDG_CACHE_HOME (~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sage-draft"


def config_dir() -> Path:
    """Returns the folder of the YAML files: `train/_conf` of an installed package, `conf/` of a checkout."""
    installed = PACKAGES_DIR / "train" / "_conf"
    return installed if installed.is_dir() else PACKAGES_DIR / "conf"


def package_dir(name: str) -> str:
    """Returns the folder of a package of this project, without importing it."""
    folder = PACKAGES_DIR / name
    assert folder.is_dir(), name
    return str(folder)


def import_installed(name: str) -> None:
    """Imports a package from the folder that contains `sage`; ImportError if another module of that name is imported."""
    path = PACKAGES_DIR / name / "__init__.py"
    module = sys.modules.get(name)
    if module is not None:
        other = getattr(module, "__file__", None)
        if other is None or Path(other).resolve() != path:
            raise ImportError(
                f"{other or name}: this module is imported in place of sage-draft's package {name}; "
                f"import sage.training first, or rename the file"
            )
        return
    spec = spec_from_file_location(name, path, submodule_search_locations=[str(path.parent)])
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def json_digest(value: Any) -> str:
    """Returns a digest of the content of a value, 32 hexadecimal digits; what JSON does not know counts as its text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path for a file, which is renamed to `path` if the block ends without an error.

    The parent folder is created if needed. After an error, `path` is unchanged and no temporary file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


class CannotWrite(OSError):
    """The output cannot be written: the disk is full, or the path is not writable; `instead` is what the user can choose."""

    @classmethod
    def at(cls, path: Path, error: OSError, instead: str) -> CannotWrite:
        return cls(f"{path}: could not be written ({error.strerror or error}); free disk space, or choose {instead}")


@contextmanager
def naming_write_errors(path: Path, instead: str = "another path") -> Iterator[None]:
    """Turns an OSError of the block into a `CannotWrite` that names `path`; errors of files elsewhere pass unchanged."""
    try:
        yield
    except CannotWrite:
        raise
    except OSError as error:
        failed = path if error.filename is None else Path(str(error.filename))
        if path.parent not in (failed, *failed.parents) and failed not in path.parents:
            raise
        raise CannotWrite.at(path, error, instead) from error


@contextmanager
def writing(path: Path, instead: str = "another path") -> Iterator[Path]:
    """`atomic_path` that raises CannotWrite if the disk is full or not writable."""
    with naming_write_errors(path, instead), atomic_path(path) as temporary:
        yield temporary


def check_writable(path: Path) -> None:
    """Raises CannotWrite if `path` cannot be created; called before the work whose result goes there. Leaves no file."""
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise CannotWrite.at(path, error, "another path") from error


@contextmanager
def locked(path: Path, instead: str = "another path", waiting: str = "") -> Iterator[None]:
    """Holds a lock on `path` among all processes of this machine (and of a shared file system that supports locks).

    `waiting` is logged once, with the name of the lock for `{lock}`, if another process holds it. CannotWrite if the lock file
    cannot be created.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path.parent / f".{path.name}.lock")
    with naming_write_errors(path, instead):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(Timeout):
            lock.acquire(timeout=0)
        if not lock.is_locked:
            if waiting:
                logger.warning("%s", waiting.format(lock=lock.lock_file))
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically, in UTF-8."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file atomically. Raises ValueError for NaN and infinity."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file. Raises ValueError that names the file and the reason."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: missing or unreadable ({error.strerror or error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: contains a {type(content).__name__}, not a JSON object")
    return content


def fsync_tree(folder: Path) -> None:
    """Flushes a folder and everything in it to disk."""
    for path in (*sorted(folder.rglob("*")), folder):
        fsync(path)


def fsync(path: Path) -> None:
    """Flushes a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

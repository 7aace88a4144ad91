"""Checks of the run folder: new, or a run to be resumed, and writable. Does not own: its settings (train.config.resuming)."""

from __future__ import annotations

from pathlib import Path

from checkpoints.run_folder import CONFIG, LOCK, is_run
from sage.io.files import CannotWrite, check_writable
from train.config.schema import ConfigError, RunConfig


def check_run_folder(run: RunConfig) -> None:
    """Refuses a run folder that would be overwritten or cannot be written.

    Raises:
        ConfigError: names `run.dir`.
    """
    folder = Path(run.dir)
    if not run.dir.strip():
        raise ConfigError("run.dir=: allowed: a folder; give run.dir=DIR")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.dir={folder}: allowed: a folder; this is a file, give another path")
    if is_run(folder) and not run.resume:
        raise ConfigError(f"run.dir={folder}: already holds a run; give run.resume=true to continue it, or another run.dir")
    if folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()) and not is_run(folder):
        raise ConfigError(f"run.dir={folder}: is not empty and holds no run; give a new or an empty folder")
    try:
        check_writable(folder / CONFIG)
    except CannotWrite as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise ConfigError(f"run.dir={folder}: cannot be written ({reason}); give a folder with write permission") from error

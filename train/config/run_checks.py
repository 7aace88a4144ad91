"""Checks of the run folder: new, or a run to be resumed with the same settings, and writable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from checkpoints.run_folder import CONFIG, is_run
from data_prep.files import CannotWrite, check_writable
from train.config.schema import Config, ConfigError, RunConfig

# Prefixes of the keys that may not change when a run is resumed.
FIXED = (
    *("seed", "target.path", "target.revision", "target.dtype", "draft.", "data.", "score."),
    *("train.global_batch_size", "train.precision", "train.length_window"),
)
CHANGEABLE = ("data.num_workers", "data.bad_list")  # not data.cache: known lengths change the batches


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
    if folder.is_dir() and any(folder.iterdir()) and not is_run(folder):
        raise ConfigError(f"run.dir={folder}: is not empty and holds no run; give a new or an empty folder")
    try:
        check_writable(folder / CONFIG)
    except CannotWrite as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise ConfigError(f"run.dir={folder}: cannot be written ({reason}); give a folder with write permission") from error


def check_same_run(config: Config) -> None:
    """Refuses to resume a run with other settings of the keys in `FIXED`.

    Raises:
        ConfigError: names the first changed key.
    """
    path = Path(config.run.dir) / CONFIG
    if not path.exists():
        return
    try:
        saved = dotted_keys(OmegaConf.to_container(OmegaConf.load(path)))
    except Exception as error:  # PyYAML has a dozen error classes of its own
        raise ConfigError(f"{path}: cannot be read ({' '.join(str(error).split())}); give another run.dir") from error
    current = dotted_keys(OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.structured(config)))))
    for key in sorted(saved.keys() | current.keys()):
        if key.startswith(FIXED) and not key.startswith(CHANGEABLE) and saved.get(key) != current.get(key):
            raise ConfigError(
                f"{key}={current.get(key)}: the run in {config.run.dir} was started with {saved.get(key)}; "
                f"resume with that value, or start another run.dir"
            )


def dotted_keys(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested mappings: {"a": {"b": 1}} -> {"a.b": 1}."""
    if not isinstance(tree, dict) or not tree:
        return {prefix.rstrip("."): tree}
    return {key: value for name, part in tree.items() for key, value in dotted_keys(part, f"{prefix}{name}.").items()}

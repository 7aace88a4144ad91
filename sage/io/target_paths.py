"""The folder or hub id of the target that a user names: a name of conf/target, a folder, or a hub id. Imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

import yaml

from sage.io.files import config_dir, package_dir, user_cache_dir
from sage.io.gguf_files import gguf_of, unpacked
from sage.io.names import did_you_mean

CONFIG = "config.json"
BY_PATH = "by_path"  # the choice of conf/target that stands for any folder


def target_names() -> list[str]:
    """Returns the names of conf/target, sorted."""
    return sorted(path.stem for path in (config_dir() / "target").glob("*.yaml") if path.stem != BY_PATH)


def path_of_target(name: str) -> str:
    """Returns the folder or hub id of a name of conf/target, and the unpacked folder of a GGUF file; anything else as it is.

    A folder of that name takes precedence.
    """
    file = config_dir() / "target" / f"{name}.yaml"
    if gguf := gguf_of(os.path.expanduser(name)):
        return str(unpacked(gguf))
    if name == BY_PATH or Path(name).exists() or Path(name).name != name or not file.is_file():
        return name
    found = str(yaml.safe_load(file.read_text(encoding="utf-8"))["path"])
    found = found.replace("${user_cache:}", str(user_cache_dir()))
    return re.sub(r"\$\{package_dir:(\w+)\}", lambda package: package_dir(package[1]), found)


def find_target(name: str, key: str = "target") -> str:
    """Returns `path_of_target`, `~` expanded; ValueError, with the `key` of the setting, for a local path without a model."""
    path = os.path.expanduser(path_of_target(name))
    if looks_local(path) and not Path(path).is_dir():
        hint = did_you_mean(path, target_names())
        raise ValueError(f"{key}: {path}: no such folder{hint}; {how_to_get(path)}")
    refuse_without_config(path, key)
    return path


def how_to_get(path: str) -> str:
    """Returns the remedy for the path of a target that does not exist."""
    if Path(path).is_relative_to(user_cache_dir() / "real"):
        return "python -m data_prep.real builds it"
    return "give a local folder or a hub id like Qwen/Qwen2.5-VL-7B-Instruct"


def refuse_without_config(path: str, key: str = "target") -> None:
    """Raises ValueError for a local folder that holds no config.json."""
    if Path(path).is_dir() and not (Path(path) / CONFIG).is_file():
        raise ValueError(f"{key}: {path}: no {CONFIG} there; give the folder of a model")


def looks_local(path: str) -> bool:
    """Whether a path cannot be a hub id, `owner/name`."""
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path).exists()

"""The configuration of an existing run, read back with the types of the schema."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from checkpoints.run_folder import dotted_keys, read_run_config
from train.config.schema import Config, ConfigError
from train.config.store import subschemas

TYPED_GROUPS = ("draft", "draft/compressor", "tracking")  # their choices have different keys


def read_plain(run: Path, remedy: str) -> dict[str, Any]:
    """Returns the configuration that the run used last, as nested plain values.

    Raises:
        ConfigError: it cannot be read; ends with `remedy`.
    """
    try:
        return read_run_config(run)
    except ValueError as error:
        raise ConfigError(f"{error}; {remedy}") from error


def with_types(saved: Mapping[str, Any]) -> DictConfig:
    """Returns the saved values with the types of the schema, and the defaults of other keys.

    Raises:
        OmegaConfBaseException, KeyError: a key or a value does not fit the schema.
    """
    config = OmegaConf.structured(Config)
    for group, kind in kinds_of(saved).items():
        OmegaConf.update(config, group.replace("/", "."), OmegaConf.structured(subschemas()[(group, kind)]), merge=False)
    merged = OmegaConf.merge(config, saved)
    assert isinstance(merged, DictConfig)
    return merged


def kinds_of(saved: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chosen kinds of `TYPED_GROUPS`."""
    values = dotted_keys(dict(saved))
    found = {group: values.get(f"{group.replace('/', '.')}.kind") for group in TYPED_GROUPS}
    return {group: str(kind) for group, kind in found.items() if kind}

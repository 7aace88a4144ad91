"""The words of a command line: which keys they give, and which of them a command could only ignore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from hydra.core.hydra_config import HydraConfig

from train.config.schema import ConfigError, LaunchConfig


def key_of(word: str) -> str:
    """`+group@package=choice` -> `group`; `key=value` -> `key`."""
    return word.split("=", 1)[0].lstrip("+~").split("@")[0]


def task_words() -> list[str]:
    """What the command line of this process says, `key=value`; nothing where Hydra does not run it."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def refuse_idle(words: Sequence[str], idle: Mapping[str, str]) -> None:
    """A setting without effect is a mistake.

    Args:
        idle: dotted keys, or beginnings of them that end in a dot, and for each what it is idle in and the remedy.

    Raises:
        ConfigError: the first idle word.
    """
    for word in words:
        for key, why in idle.items():
            if key_of(word) == key or (key.endswith(".") and key_of(word).startswith(key)):
                raise ConfigError(f"{word}: has no effect {why}")


def launch_keys(*used: str) -> list[str]:
    """The keys of `launch` but those `used`."""
    return [f"launch.{field.name}" for field in fields(LaunchConfig) if field.name not in used]

"""Training from Python, whatever the working directory contains: `from sage.training import compose, run`.

Importing this package imports the installed `train`, `data_prep` and `checkpoints`, which lie beside `sage`, so that a user's
own `train.py` is not imported in their place. The names are those of the package `train`; torch is imported when a run starts.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from sage.io.files import import_installed

if TYPE_CHECKING:
    from train import Callback, Config, ConfigError, compose, run

PACKAGES = ("checkpoints", "data_prep", "train")
Result = TypeVar("Result")
__all__ = ["Callback", "Config", "ConfigError", "compose", "run"]


for _name in PACKAGES:
    import_installed(_name)


def call(work: Callable[..., Result], *arguments: Any) -> Result:
    """Returns `work(*arguments)`. A process that is started with it imports this module before it looks up `work`."""
    return work(*arguments)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sage.training' has no attribute {name!r}")
    return getattr(import_module("train"), name)

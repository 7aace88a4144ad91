"""Training of draft heads: `train.run(train.compose("target=pocket_qwen2_5_vl", "data=pocket"))`.

Importing the package is cheap; torch is imported when a run starts. `sage.training` has the same names, also where another
module is called `train`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import sage.training  # so that `data_prep` and `checkpoints` are those beside `sage`

if TYPE_CHECKING:
    from train.config.schema import Config, ConfigError
    from train.job.callbacks import Callback
    from train.job.run import compose, run

_HOME = {
    "Callback": "train.job.callbacks",
    "Config": "train.config.schema",
    "ConfigError": "train.config.schema",
    "compose": "train.job.run",
    "run": "train.job.run",
}
__all__ = ["Callback", "Config", "ConfigError", "compose", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'train' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)

"""Conversations and pictures in, model-ready examples out.

Names are loaded on first use: a command that only reads the settings must not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_prep.batching.loader import StepLoader
    from data_prep.build import build_dataset, prompts
    from data_prep.chat import build_example
    from data_prep.config import DataConfig, SourceConfig
    from data_prep.conversation import BadItem, Conversation

_HOME = {
    "BadItem": "data_prep.conversation",
    "Conversation": "data_prep.conversation",
    "DataConfig": "data_prep.config",
    "SourceConfig": "data_prep.config",
    "StepLoader": "data_prep.batching.loader",
    "build_dataset": "data_prep.build",
    "build_example": "data_prep.chat",
    "prompts": "data_prep.build",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'data_prep' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


__all__ = [
    "BadItem",
    "Conversation",
    "DataConfig",
    "SourceConfig",
    "StepLoader",
    "build_dataset",
    "build_example",
    "prompts",
]

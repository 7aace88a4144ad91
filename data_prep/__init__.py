"""Preparation of training data: from conversations with images and videos to batches of encoded examples.

The rooms, each of which imports only those before it: pocket (generated data and small targets), sources (readers of on-disk
formats), dataset (validated, cached, mixed examples), batching (micro-batches per step), tools (the actions of `sage-data`).
The modules beside them are shared by the rooms; `build` connects them. Names are imported on first use, so that reading the
settings does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_prep.batching.loader import StepLoader
    from data_prep.build import build_dataset, prompts
    from data_prep.chat import build_example
    from data_prep.config import DataConfig
    from data_prep.conversation import BadItem, Conversation
    from data_prep.sources import SourceConfig

_MODULES = {
    "BadItem": "data_prep.conversation",
    "Conversation": "data_prep.conversation",
    "DataConfig": "data_prep.config",
    "SourceConfig": "data_prep.sources",
    "StepLoader": "data_prep.batching.loader",
    "build_dataset": "data_prep.build",
    "build_example": "data_prep.chat",
    "prompts": "data_prep.build",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'data_prep' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


__all__ = ["BadItem", "Conversation", "DataConfig", "SourceConfig", "StepLoader", "build_dataset", "build_example", "prompts"]

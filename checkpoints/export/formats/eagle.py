"""The `eagle` format (EAGLE-1/2) in one flavour per engine: vLLM's fc has no bias, SGLang's has one (written as zeros)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from checkpoints.export.formats.eagle3 import layer_config
from checkpoints.export.formats.layout import EAGLE_CLASSES, Flavour
from checkpoints.export.target_facts import TargetFacts
from sage.io.dtypes import dtype_name


def eagle_config(draft: Any, facts: TargetFacts, dtype: torch.dtype, flavour: Flavour) -> dict[str, Any]:
    """Returns config.json of the `eagle` format for an engine; see `eagle3_config` for the arguments."""
    return {
        "architectures": [EAGLE_CLASSES[flavour]],
        "model_type": "llama",
        **layer_config(draft, facts),
        "dtype": dtype_name(dtype),
        "torch_dtype": dtype_name(dtype),
    }


def eagle_tensors(state: dict[str, Tensor], dtype: torch.dtype, flavour: Flavour) -> dict[str, Tensor]:
    """Returns a trained draft's tensors under the engine's names."""
    tensors = {_renamed(name): tensor.to(dtype) for name, tensor in state.items()}
    if flavour == Flavour.sglang:
        tensors["fc.bias"] = torch.zeros(len(tensors["fc.weight"]), dtype=dtype)
    return tensors


def from_eagle_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inverts `eagle_tensors`, without embedding and bias."""
    kept = {name: tensor for name, tensor in tensors.items() if name not in ("fc.bias", "embed_tokens.weight")}
    return {name.replace("layers.0.", "layer.", 1): tensor for name, tensor in kept.items()}


def _renamed(name: str) -> str:
    return name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name

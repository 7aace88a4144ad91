"""The `eagle` format (EAGLE-1/2), one flavour per engine: vLLM's fc has no bias, SGLang's has one and gets zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from checkpoints.export.facts import TargetFacts
from checkpoints.export.formats.eagle3 import layer_config
from checkpoints.export.formats.layout import EAGLE_CLASSES, Flavour
from sage.dtypes import dtype_name


def eagle_config(draft: Any, facts: TargetFacts, dtype: torch.dtype, flavour: Flavour) -> dict[str, Any]:
    """config.json of the `eagle` format in an engine's flavour; arguments as in `eagle3_config`."""
    return {
        "architectures": [EAGLE_CLASSES[flavour]],
        "model_type": "llama",
        **layer_config(draft, facts),
        "dtype": dtype_name(dtype),
        "torch_dtype": dtype_name(dtype),
    }


def eagle_tensors(state: dict[str, Tensor], dtype: torch.dtype, flavour: Flavour) -> dict[str, Tensor]:
    """A trained draft's tensors under the names of the engine."""
    tensors = {_renamed(name): tensor.to(dtype) for name, tensor in state.items()}
    if flavour == Flavour.sglang:
        tensors["fc.bias"] = torch.zeros(len(tensors["fc.weight"]), dtype=dtype)
    return tensors


def from_eagle_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `eagle_tensors`, without embedding and bias."""
    kept = {name: tensor for name, tensor in tensors.items() if name not in ("fc.bias", "embed_tokens.weight")}
    return {name.replace("layers.0.", "layer.", 1): tensor for name, tensor in kept.items()}


def _renamed(name: str) -> str:
    return name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name

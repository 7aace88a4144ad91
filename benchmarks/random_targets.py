"""Random models of the shapes of published targets, for cost measurements."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig

from sage.bench.shapes import VISION_OF, Shape
from sage.io.machine import free_bytes
from sage.targets import Target
from sage.targets.families import FAMILIES

USABLE_MEMORY = 0.7  # share of free memory; the rest is for activations, KV cache and other processes


def layers_that_fit(shape: Shape, dtype: torch.dtype, device: torch.device) -> int:
    """Returns the layers that fit into free memory, beside embedding, lm_head and a draft layer; ValueError if none fits."""
    available = free_bytes(device)
    if available is None:
        raise ValueError("--layers: the free memory of this system is unknown; give the number of layers")
    usable = USABLE_MEMORY * available - shape.vocabulary_parameters * dtype.itemsize
    fit = int(usable // (shape.layer_parameters * dtype.itemsize)) - 2  # the draft: a layer, and fc of about a layer
    if fit < 1:
        raise ValueError(
            f"--shape {shape.name}: no layer fits into the free memory of {device}; choose a smaller shape or free memory"
        )
    return min(fit, shape.num_layers)


def random_target(shape: Shape, num_layers: int, dtype: torch.dtype, device: torch.device, context: int) -> Target:
    """Returns a target of this shape with `num_layers` text layers and random weights; a vision tower has one small block."""
    text = _text_config(shape, num_layers, context)
    if shape.model_type in VISION_OF:
        vision = VISION_OF[shape.model_type] | {"out_hidden_size": shape.hidden_size}
        config = AutoConfig.for_model(
            shape.model_type, text_config=text, vision_config=vision, tie_word_embeddings=shape.is_tied
        )
    else:
        config = AutoConfig.for_model(shape.model_type, **text)
    with torch.device(device):
        return Target(FAMILIES[shape.model_type].auto_class.from_config(config, dtype=dtype))


def _text_config(shape: Shape, num_layers: int, context: int) -> dict[str, Any]:
    half = shape.head_dim // 2
    height = half * 3 // 8  # Qwen2.5-VL splits 64 frequencies into 16, 24, 24
    section = {"mrope_section": [half - 2 * height, height, height]} if shape.model_type in VISION_OF else {}
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "sliding_window": None,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, **section},
        "tie_word_embeddings": shape.is_tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }

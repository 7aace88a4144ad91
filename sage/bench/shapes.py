"""Shapes of real targets' text models, and random models of these shapes for cost measurements."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from sage.targets import Target

VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1}
USABLE_MEMORY = 0.7  # share of free memory; the rest is for activations, KV cache and other processes


@dataclass(frozen=True)
class Shape:
    """Dimensions of a text model, named as in config.json."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    is_tied: bool = False  # lm_head shares the embedding's weights

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer, without biases and norms."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def vocabulary_parameters(self) -> int:
        """Weights of embedding and lm_head."""
        return (1 if self.is_tied else 2) * self.vocab_size * self.hidden_size


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen2_5_vl_3b", 2048, 11008, 36, 16, 2, 151936, is_tied=True),
        Shape("qwen2_5_vl_7b", 3584, 18944, 28, 28, 4, 152064),
        Shape("qwen2_5_vl_32b", 5120, 27648, 64, 40, 8, 152064),
        Shape("qwen2_5_vl_72b", 8192, 29568, 80, 64, 8, 152064),
    )
}


def shape_named(name: str) -> Shape:
    """Returns the shape of that name; ValueError for an unknown name lists the known ones."""
    if name not in SHAPES:
        raise ValueError(f"--shape {name!r} is unknown; choose one of {', '.join(SHAPES)}")
    return SHAPES[name]


def layers_that_fit(shape: Shape, dtype: torch.dtype, device: torch.device) -> int:
    """Returns the layers that fit into free memory, beside embedding, lm_head and a draft layer; ValueError if none fits."""
    free_bytes = USABLE_MEMORY * _free_bytes(device) - shape.vocabulary_parameters * dtype.itemsize
    fit = int(free_bytes // (shape.layer_parameters * dtype.itemsize)) - 2  # the draft: a layer, and fc of about a layer
    if fit < 1:
        raise ValueError(
            f"--shape {shape.name}: no layer fits into the free memory of {device}; choose a smaller shape or free memory"
        )
    return min(fit, shape.num_layers)


def random_target(shape: Shape, num_layers: int, dtype: torch.dtype, device: torch.device, context: int) -> Target:
    """Returns a target of this shape with `num_layers` text layers, random weights and a vision tower of one small block."""
    config = Qwen2_5_VLConfig(
        text_config=_text_config(shape, num_layers, context),
        vision_config=VISION | {"out_hidden_size": shape.hidden_size},
        tie_word_embeddings=shape.is_tied,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen2_5_VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)
    return Target(model)


def _text_config(shape: Shape, num_layers: int, context: int) -> dict[str, Any]:
    half = shape.head_dim // 2
    height = half * 3 // 8  # the released models split 64 frequencies into 16, 24, 24
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [half - 2 * height, height, height]},
        "tie_word_embeddings": shape.is_tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise ValueError("--layers: the free memory of this system is unknown; give the number of layers")

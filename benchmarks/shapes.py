"""Shapes of published targets' text models. Imports no torch.

The sizes are those of `architecture` in conf/target. A mixture of experts has no shape: its cost depends on the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from sage.io.files import config_dir

TEXT_TYPES = ("llama", "mistral", "qwen2", "qwen3")
VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1}
VISION_OF = {"qwen2_5_vl": VISION, "qwen3_vl": VISION | {"deepstack_visual_indexes": []}}  # a tower of one small block


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
    head_dim: int
    is_tied: bool = False  # lm_head shares the embedding's weights
    model_type: str = "qwen2_5_vl"

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer, without biases and norms."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def pass_parameters(self) -> int:
        """Weights that a pass reads: all layers and lm_head; of the embedding, it reads single rows only."""
        return self.num_layers * self.layer_parameters + self.vocab_size * self.hidden_size

    @property
    def vocabulary_parameters(self) -> int:
        """Weights of embedding and lm_head."""
        return (1 if self.is_tied else 2) * self.vocab_size * self.hidden_size


def shape_of(name: str, architecture: dict[str, Any]) -> Shape:
    """Returns the shape of a target from the fields of its config.json."""
    text = architecture.get("text_config", architecture)
    return Shape(
        name=name,
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_layers=text["num_hidden_layers"],
        num_heads=text["num_attention_heads"],
        num_kv_heads=text["num_key_value_heads"],
        vocab_size=text["vocab_size"],
        head_dim=text.get("head_dim", text["hidden_size"] // text["num_attention_heads"]),
        is_tied=architecture["tie_word_embeddings"],
        model_type=architecture["model_type"],
    )


@cache
def shapes() -> dict[str, Shape]:
    """Returns name -> shape of the targets in conf/target, read at the first call."""
    files = (yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted((config_dir() / "target").glob("*.yaml")))
    known = [file for file in files if file.get("architecture", {}).get("model_type") in {*TEXT_TYPES, *VISION_OF}]
    return {file["name"]: shape_of(file["name"], file["architecture"]) for file in known}


def shape_named(name: str) -> Shape:
    """Returns the shape of that name; ValueError for an unknown name lists the known ones."""
    if name not in shapes():
        raise ValueError(f"--shape {name!r} is unknown; choose one of {', '.join(shapes())}")
    return shapes()[name]

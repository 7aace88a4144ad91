"""Rotary position embeddings of draft heads: the target's frequencies, scaling and axes.

Shapes: B batch, H heads, T tokens, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SCALED_TYPES = ("linear", "llama3", "yarn")  # their frequencies do not depend on the sequence length


class Rope(nn.Module):
    """Rotary embeddings; with `mrope_section` the frequencies are split among temporal, height and width positions.

    Ref: Qwen2-VL, arXiv 2409.12191, section 2.1 (M-RoPE).
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        # Plain attributes, not buffers: loading on the meta device would leave a non-persistent buffer empty.
        self.head_dim, self.theta = config.head_dim, config.rope_theta
        self.max_position_embeddings, self.scaled = config.max_position_embeddings, config.scaled_rope
        if self.scaled is not None:
            check_rope_type(self.scaled.get("rope_type"))
        self.axes = [axis for axis, size in enumerate(config.mrope_section or []) for _ in range(size)]
        self._tables: dict[torch.device, tuple[Tensor, Tensor, float]] = {}

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, float]:
        """Frequencies [d / 2], their axes (LongTensor [d / 2] or [0]), and the factor of cos and sin, on a device."""
        if device not in self._tables:
            frequency, factor = self._frequencies(device)
            self._tables[device] = (frequency, torch.tensor(self.axes, device=device, dtype=torch.long), factor)
        return self._tables[device]

    def _frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        if self.scaled is None:
            exponents = [i / self.head_dim for i in range(0, self.head_dim, 2)]
            return self.theta ** -torch.tensor(exponents, device=device), 1.0
        like_llama = LlamaConfig(
            hidden_size=self.head_dim,
            num_attention_heads=1,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters={"rope_theta": self.theta, **self.scaled},
        )
        with torch.device("cpu"):
            frequency, factor = ROPE_INIT_FUNCTIONS[self.scaled["rope_type"]](like_llama, torch.device("cpu"))
        return frequency.to(device), float(factor)

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions [B, T] or, only with `mrope_section` (else ValueError), [3, B, T] -> cos and sin, each [B, 1, T, d]."""
        frequency, axes, factor = self._on(position_ids.device)
        if position_ids.dim() == 3:
            if not self.axes:
                raise ValueError("draft.mrope_section: missing, but the target's positions have three axes")
            angles = position_ids[axes].permute(1, 2, 0).float() * frequency
        else:
            angles = position_ids[..., None].float() * frequency
        angles = torch.cat((angles, angles), -1)[:, None]
        cos, sin = angles.cos(), angles.sin()
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return cos.to(dtype), sin.to(dtype)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rope to [B, H, T, d], halves paired as in Llama."""
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat((-second, first), -1) * sin


def rope_fields(text_config: Any) -> dict[str, Any]:
    """Returns `rope_theta`, `mrope_section` and `scaled_rope` of a target; ValueError for a rope that heads cannot follow."""
    rope = dict(getattr(text_config, "rope_parameters", None) or {})
    if "rope_theta" not in rope:
        raise ValueError("target.rope_parameters: no single rope_theta; draft heads follow one rope for all layers")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"target.rope_parameters.partial_rotary_factor: {rope['partial_rotary_factor']}; allowed: 1.0; train draft=model"
        )
    rope_type = rope.get("rope_type", "default")
    if rope_type != "default":
        check_rope_type(rope_type)
    scaled = {key: value for key, value in rope.items() if key not in ("rope_theta", "mrope_section", "type")}
    return {
        "rope_theta": rope["rope_theta"],
        "mrope_section": rope.get("mrope_section"),
        "scaled_rope": None if rope_type == "default" else scaled,
    }


def check_rope_type(rope_type: Any) -> None:
    """Raises ValueError if the frequencies of a scaled rope are unknown, or depend on the sequence length."""
    if rope_type not in SCALED_TYPES:
        raise ValueError(
            f"target.rope_parameters.rope_type: {rope_type!r}; allowed: default, {', '.join(SCALED_TYPES)}, whose frequencies "
            f"do not depend on the sequence length; train draft=model for this target"
        )

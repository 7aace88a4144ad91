"""Rotary position embeddings of draft heads: the target's frequencies, scaling and axes.

Shapes: B batch, H heads, T tokens, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sage.targets.rope import check_rope_type


class Rope(nn.Module):
    """Rotary embeddings; with `mrope_section` the frequencies are split among temporal, height and width positions.

    Ref: Qwen2-VL, arXiv 2409.12191, section 2.1 (M-RoPE); Qwen3-VL, arXiv 2511.21631, section 2 (interleaved M-RoPE).
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        # Plain attributes, not buffers: loading on the meta device would leave a non-persistent buffer empty.
        self.head_dim, self.theta = config.head_dim, config.rope_theta
        self.max_position_embeddings, self.scaled = config.max_position_embeddings, config.scaled_rope
        if self.scaled is not None:
            check_rope_type(self.scaled.get("rope_type"))
        self.axes = rope_axes(config.mrope_section or [], config.mrope_interleaved)
        self._factors: dict[torch.device, tuple[Tensor, Tensor, float]] = {}

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, float]:
        """Frequencies [d / 2], their axes (LongTensor [d / 2] or [0]), and the factor of cos and sin, on a device."""
        if device not in self._factors:
            frequency, factor = self._frequencies(device)
            self._factors[device] = (frequency, torch.tensor(self.axes, device=device, dtype=torch.long), factor)
        return self._factors[device]

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


def rope_axes(section: list[int], is_interleaved: bool) -> list[int]:
    """Returns the axis of every frequency [d / 2]: 0 temporal, 1 height, 2 width.

    `section` [2, 1, 1] is 0 0 1 2, interleaved 0 1 2 0: height has the frequencies 1, 4, 7, .. and width 2, 5, 8, .. below
    three times their number, as far as there are frequencies, and the temporal axis has the others.
    """
    if not is_interleaved:
        return [axis for axis, size in enumerate(section) for _ in range(size)]
    axes = [0] * sum(section)
    for axis in (1, 2):
        places = range(axis, min(3 * section[axis], len(axes)), 3)
        axes[places.start : places.stop : 3] = [axis] * len(places)
    return axes

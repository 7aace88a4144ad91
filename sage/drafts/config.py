"""Configuration that all draft heads have in common: sizes after the target, its rope, and the target itself."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from transformers import PreTrainedConfig


class HeadConfig(PreTrainedConfig):
    """Configuration of a draft head.

    Args:
        target: fingerprint of the target, which `load_draft` compares.
        target_path: folder or hub id of the target, the default of `sage-generate`.
        target_adapter: folder or hub id of the adapter that the target contained.
        mrope_section, mrope_interleaved, scaled_rope: the target's rope (see `sage.targets.rope`).
    """

    hidden_size: int = 192
    intermediate_size: int = 512
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 1024
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_theta: float = 1e6
    mrope_section: list[int] | None = None
    mrope_interleaved: bool = False
    scaled_rope: dict[str, Any] | None = None
    initializer_range: float = 0.02
    target: dict[str, Any] = field(default_factory=dict)
    target_path: str | None = None
    target_adapter: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of config.json; some fields are written only if set."""
        unset = {name for name in ("mrope_interleaved", "scaled_rope", "target_adapter") if not getattr(self, name)}
        return {name: value for name, value in super().to_dict().items() if name not in unset}

"""One decoder layer for draft heads: grouped-query attention without biases, a gated MLP, and rope.

The layer is Llama's, the one that serving engines use for every EAGLE draft; the rope has the target's frequencies, scaling and
axes.

Shapes: B batch, T tokens, N new tokens, S keys, D hidden, H heads, d head size.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sage.drafts.unroll import Chains, masked_attention
from sage.runtime.attention import causal_attention, packed_attention
from sage.runtime.cache import PackedCache
from sage.targets.rope import check_rope_type

Angles: TypeAlias = tuple[Tensor, Tensor]  # cos and sin, [B or 1, 1, T, d] each


class LastQuery:
    """A cache in whose pass only the last entry of each request attends; the entries before it are keys and values.

    All that a draft needs of a prompt, or of accepted tokens, is the output of the last pair. In a head with one layer, nothing
    else reads those of the others, so their queries, attention and MLP are left out.

    Args:
        ends: LongTensor [R], the last entries; None for that of a single request.
    """

    selects_queries = True

    def __init__(self, cache: Cache, ends: Tensor | None = None) -> None:
        self.cache, self.ends = cache, ends

    def queries(self, states: Tensor, dim: int = 1) -> Tensor:
        """Returns the last entries along dimension `dim`."""
        return states.narrow(dim, states.shape[dim] - 1, 1) if self.ends is None else states.index_select(dim, self.ends)

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        key, value = self.cache.update(keys, values, layer)
        return key, value


LayerCache: TypeAlias = Cache | Chains | LastQuery


def queries_of(cache: LayerCache | None, states: Tensor, dim: int = 1) -> Tensor:
    """Returns the entries of dimension `dim` whose outputs a pass computes."""
    return cache.queries(states, dim) if isinstance(cache, Chains | LastQuery) else states


class Attention(nn.Module):
    """Grouped-query attention over `input_size` features (2D for EAGLE-3, D otherwise).

    Args:
        layer: index of the layer in caches.
    """

    compilable: ClassVar[tuple[str, ...]] = ("project",)

    def __init__(self, config: Any, input_size: int, layer: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(input_size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, rope: Angles, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        """Returns [B, N, D]; of fewer rows where the cache selects queries."""
        if not isinstance(cache, Chains | LastQuery) or not cache.selects_queries:
            return self.attend(*self.project(hidden, rope), mask, cache)
        query = rotate(self._heads(self.q_proj(cache.queries(hidden))), *(cache.queries(angles, 2) for angles in rope))
        key, value = rotate(self._heads(self.k_proj(hidden)), *rope), self._heads(self.v_proj(hidden))
        return self.attend(query, key, value, mask, cache)

    def project(self, hidden: Tensor, rope: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [B, H, N, d], keys and values [B, H / G, N, d], rope applied to the first two."""
        query, key = (rotate(self._heads(proj(hidden)), *rope) for proj in (self.q_proj, self.k_proj))
        return query, key, self._heads(self.v_proj(hidden))

    def _heads(self, states: Tensor) -> Tensor:
        """[B, T, H * d] -> [B, H, T, d]."""
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        """Returns [B, N, D] of queries [B, H, N, d]. Without a cache, all heads share the mask."""
        heads = self._attend(query, key, value, mask, cache).reshape(query.shape).transpose(1, 2)
        return self.o_proj(heads.reshape(*heads.shape[:2], -1))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        """Returns [B, H, N, d] or, folded, [B, H / G, G * N, d]."""
        if isinstance(cache, Chains):
            return cache.attend(query, key, value)
        if cache is None and mask is not None:
            return masked_attention(query, key, value, mask)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        inner = cache.cache if isinstance(cache, LastQuery) else cache
        if isinstance(inner, PackedCache) and inner.queries is not None:
            return packed_attention(query, key, value, mask, inner.queries).transpose(1, 2)
        if mask is None and query.shape[2] > 1:
            return causal_attention(query, key, value)
        folded = query.reshape(query.shape[0], key.shape[1], -1, self.head_dim)
        return nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask)


class MLP(nn.Module):
    """Gated feed-forward block."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        # side by side, as in earlier versions: the gradient of the activation is rounded differently for other strides
        gate, up = torch.cat((self.gate_proj(hidden), self.up_proj(hidden)), -1).chunk(2, -1)
        return self.down_proj(self.activation(gate) * up)


class GatedLayer(nn.Module):
    """The part of a layer after its attention.

    Attributes:
        compilable: methods that are functions of tensors alone, which a training run may compile.
    """

    compilable: ClassVar[tuple[str, ...]] = ("feed_forward",)
    post_attention_layernorm: nn.RMSNorm
    mlp: MLP

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Adds the MLP's output, [.., D] -> [.., D]."""
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftLayer(GatedLayer):
    """EAGLE's decoder layer, `layer` its index in caches."""

    def __init__(self, config: Any, layer: int = 0) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps) if config.input_norm else nn.Identity()
        self.self_attn = Attention(config, config.hidden_size, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, rope: Angles, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        """[B, N, D] -> [B, N, D]; [B, R, D] where the cache selects R queries.

        Args:
            rope: cos and sin, each [B, 1, N, d].
            mask: additive, tiled for grouped queries [B or 1, 1, G * N, S]; None attends causally.
            cache: one-layer cache to read and extend, or the chains of an unrolled pass; None attends within `hidden`.
        """
        residual = queries_of(cache, hidden)
        hidden = residual + self.self_attn(self.input_layernorm(hidden), rope, mask, cache)
        return self.feed_forward(hidden)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rope to [B, H, T, d], halves paired as in Llama."""
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat((-second, first), -1) * sin


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
        self._factors: dict[torch.device, tuple[Tensor, float, Tensor]] = {}

    def _frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        """Returns frequencies [d / 2], and the factor of cos and sin."""
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
        device = position_ids.device
        if device not in self._factors:
            axes = torch.tensor(self.axes, device=device, dtype=torch.long)
            self._factors[device] = (*self._frequencies(device), axes)
        frequency, factor, axes = self._factors[device]
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

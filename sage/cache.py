"""A preallocated KV cache that compacts an accepted tree path in place.

`DynamicCache` copies itself in every step and cannot select by position; `StaticCache` attends over its full length.
`TreeCache` writes into one buffer for all layers, returns views of the filled part, and moves accepted rows with one gather.

Shapes: L layers, B batch, H KV heads, C capacity, S filled length, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from sage.host_tensors import cached_index


class _Layer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the buffer is allocated by `TreeCache`."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, new = self.length, key_states.shape[-2]
        self.length += new
        self.keys.narrow(-2, start, new).copy_(key_states)
        self.values.narrow(-2, start, new).copy_(value_states)
        return self.keys.narrow(-2, 0, self.length), self.values.narrow(-2, 0, self.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return int(self.keys.shape[-2])


class TreeCache(Cache):
    """KV cache of `num_layers` layers with room for `capacity` tokens: prompt, new tokens and the largest tree."""

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.storage = torch.empty(num_layers, 2, 1, num_kv_heads, capacity, head_dim, dtype=dtype, device=device)
        super().__init__(layers=[_Layer(layer[0], layer[1]) for layer in self.storage])

    @property
    def length(self) -> int:
        """Number of cached tokens S."""
        return self.layers[0].length

    def crop_to(self, length: int) -> None:
        """Drops all tokens from position `length` on."""
        for layer in self.layers:
            layer.length = length

    def grow_to(self, capacity: int) -> None:
        """Grows the buffer to `capacity` tokens; keeps the cached ones."""
        if capacity <= self.storage.shape[-2]:
            return
        length = self.length
        grown = self.storage.new_empty(*self.storage.shape[:-2], capacity, self.storage.shape[-1])
        grown[..., :length, :] = self.storage[..., :length, :]
        self.storage = grown
        for layer, buffer in zip(self.layers, grown, strict=True):
            layer.keys, layer.values = buffer[0], buffer[1]

    def keep_path(self, start: int, path: Sequence[int]) -> None:
        """Keeps the rows of `path` among the tree rows from `start` on, and drops the others.

        Args:
            start: length before the tree was written.
            path: increasing node indices of the accepted path, the root (0) first.
        """
        end = start + len(path)
        if path[-1] != len(path) - 1:
            rows = cached_index(tuple(path), self.storage.device)
            tree = self.storage.narrow(-2, start, self.length - start)
            tree.narrow(-2, 0, len(path)).copy_(tree.index_select(-2, rows))
        self.crop_to(end)

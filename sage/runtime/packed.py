"""Rows of a cache within one pass: where its tokens are written, and which row each of its queries attends to.

A pass takes the tokens of all its requests as one sequence without padding, so layers that work token by token compute what
they have to. Attention alone is batched: queries are padded to the most of any request, keys are the rows of a `SharedCache`,
one for each request, with a length of its own.

    request     0 0 0 | 1 | 3 3          T = 6 queries of the requests in rows 0, 1 and 3 of the cache
    owners      0 0 0   1   3 3
    offsets     0 1 2   0   0 1
    places      0 1 2 | 3 . . | . . . | 4 5 .      [B, N] = [4, 3]; a dot is padding, which is masked

With a single row, there is nothing to pad: `Queries.of` returns None, and attention is that of one sequence.

Shapes: T queries of all requests, B cache rows, N queries of a request at most, H KV heads, C capacity, S keys, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True)
class Queries:
    """The queries of a pass over several rows: LongTensor [T] of each its row and its place in it, and the reverse, [B, N]."""

    owners: Tensor
    offsets: Tensor
    places: Tensor

    @classmethod
    def of(cls, owners: Tensor, offsets: Tensor, places: Tensor) -> Queries | None:
        """Returns the queries; None if there is one row."""
        return None if places.shape[0] == 1 else cls(owners, offsets, places)

    def pad(self, flat: Tensor) -> Tensor:
        """Returns states [1, H, T, d] as [B, H, N, d]."""
        rows, size = self.places.shape
        return flat[0].index_select(1, self.places.reshape(-1)).unflatten(1, (rows, size)).transpose(0, 1)

    def unpad(self, padded: Tensor) -> Tensor:
        """Returns states [B, H, N, d] as [1, T, H, d]."""
        queries = self.owners * self.places.shape[1] + self.offsets
        return padded.transpose(1, 2).flatten(0, 1).index_select(0, queries)[None]


def by_row(visible: Tensor, queries: Queries | None) -> Tensor:
    """Returns what T queries attend to, Bool [T, S], by row, [B, N, S]; as it is for a single row."""
    return visible if queries is None else visible.index_select(0, queries.places.flatten()).view(*queries.places.shape, -1)


class _Layer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, place: Sequence[Tensor], length: int) -> None:
        super().__init__()
        self.keys, self.values, self.place, self.length = keys, values, tuple(place), length
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the buffer is that of a `TreeCache`."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if buffer.shape[0] == 1:
                buffer.index_copy_(2, self.place[0], states)
            else:
                buffer.index_put_(self.place, states[0].transpose(0, 1))
        return self.keys.narrow(2, 0, self.length), self.values.narrow(2, 0, self.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return int(self.keys.shape[-2])


class PackedCache(Cache):
    """The buffers of a cache within one pass, written at given places; nothing in it is a number of the host.

    Args:
        keys, values: of every layer, [B, H, C, d].
        owners, columns: LongTensor [T], where each token is written: the row, and the place in it.
        length: S, the number of columns that the pass attends to.
        queries: of a pass over several rows.
    """

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        owners: Tensor,
        columns: Tensor,
        length: int,
        queries: Queries | None = None,
    ) -> None:
        place: tuple[Tensor, ...] = (columns,)
        if keys[0].shape[0] > 1:
            heads = torch.arange(keys[0].shape[1], device=owners.device)
            place = (owners[:, None], heads[None], columns[:, None])
        placed = {device: [index.to(device) for index in place] for device in dict.fromkeys(layer.device for layer in keys)}
        layers = zip(keys, values, strict=True)
        super().__init__(layers=[_Layer(key, value, placed[key.device], length) for key, value in layers])
        self.queries = queries

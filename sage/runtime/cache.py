"""Preallocated KV caches: `SharedCache` has a row per request, `TreeCache` is one row, `PackedCache` are the rows within one
pass.

`DynamicCache` copies itself in every step and cannot select by position; `StaticCache` attends over its full length. A
`TreeCache` writes into a buffer, returns views of the filled part, and moves accepted rows with one gather.

A pass takes the tokens of all its requests as one sequence without padding, so layers that work token by token compute what
they have to. Attention alone is batched: queries are padded to the most of any request, keys are the rows of a `SharedCache`,
one for each request, with a length of its own. With a single row there is nothing to pad: `Queries.of` returns None.

    request     0 0 0 | 1 | 3 3          T = 6 queries of the requests in rows 0, 1 and 3 of the cache
    owners      0 0 0   1   3 3
    offsets     0 1 2   0   0 1
    places      0 1 2 | 3 . . | . . . | 4 5 .      [B, N] = [4, 3]; a dot is padding, which is masked

Shapes: L layers, B rows, H KV heads, C capacity, S filled length, d head size, T queries of all requests, N of one at most.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from sage.runtime.host_tensors import cached_index

LayerSize: TypeAlias = tuple[int, int]  # KV heads H and head size d
MASK_ALIGNMENT = 8  # elements; of the memory-efficient kernel of torch


class BufferLayer(CacheLayerMixin):
    """A layer of a cache whose keys and values are buffers [B, H, C, d]; of which `length` tokens are filled."""

    is_sliding, length = False, 0

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the buffers are allocated by `SharedCache`."""

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


class SharedCache:
    """Buffers with a row for each of several requests, so that a pass can read their keys together.

    With several rows, one is zeroed when a request takes it: a pass attends to places that it must not see with a weight of 0,
    and 0 times the NaN of an earlier request is NaN.

    Args:
        devices: of each of the L layers.
        sizes: (H, d) of each layer.

    Attributes:
        places: device and sizes of each layer.
        buffers: one for each place, [its layers, 2, B, H, C, d].
        steps: LongTensor [C], 0, 1, 2, ..
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        sizes: Sequence[LayerSize],
        capacity: int,
        dtype: torch.dtype,
        num_rows: int = 1,
    ) -> None:
        self.places, self.num_rows = list(zip(devices, sizes, strict=True)), num_rows
        self._sizes = (devices, sizes, capacity, dtype)
        new = torch.empty if num_rows == 1 else torch.zeros
        self.buffers = [
            new(self.places.count((device, size)), 2, num_rows, size[0], capacity, size[1], dtype=dtype, device=device)
            for device, size in dict.fromkeys(self.places)
        ]
        self._rows: WeakValueDictionary[int, TreeCache] = WeakValueDictionary()  # that are taken
        self._set_layers()

    def with_rows(self, num_rows: int) -> SharedCache:
        """Returns an empty cache with the same layers and other rows."""
        return SharedCache(*self._sizes, num_rows)

    @property
    def capacity(self) -> int:
        """Number of tokens C that fit into each row."""
        return int(self.buffers[0].shape[-2])

    def take(self, capacity: int = 0) -> TreeCache:
        """Returns the first free row as an empty cache of at least `capacity` tokens."""
        self.grow_to(capacity)
        row = next(row for row in range(self.num_rows) if row not in self._rows)
        cache = self._rows[row] = self._new_row(row)
        if self.num_rows > 1:
            cache.zero_to(cache.capacity)
            cache.crop_to(0)
        return cache

    def _new_row(self, row: int) -> TreeCache:
        return TreeCache(self, row)

    def release(self, cache: TreeCache) -> None:
        """Frees a row."""
        self._rows.pop(cache.row, None)

    def grow_to(self, capacity: int) -> None:
        """Grows all rows to `capacity` tokens; keeps the cached ones, and the old buffers if memory runs out."""
        if capacity <= self.capacity:
            return
        larger = [buffer.new_zeros(*buffer.shape[:-2], capacity, buffer.shape[-1]) for buffer in self.buffers]
        for new, old in zip(larger, self.buffers, strict=True):
            new[..., : old.shape[-2], :] = old
        self.buffers = larger
        self._set_layers()
        self._refresh_rows()

    def _refresh_rows(self) -> None:
        for row in self._rows.values():
            row.refresh()

    def _set_layers(self) -> None:
        self.steps = torch.arange(self.capacity, device=self.buffers[0].device)
        self._layers: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def tensors(self, num_rows: int) -> dict[str, Any]:
        """Returns keys and values [num_rows, H, C, d] of every layer, of the first rows, as arguments of a pass."""
        if num_rows not in self._layers:
            layers = list(layers_in_order(self.places, [buffer.narrow(2, 0, num_rows) for buffer in self.buffers]))
            self._layers[num_rows] = ([layer[0] for layer in layers], [layer[1] for layer in layers])
        return dict(zip(("keys", "values"), self._layers[num_rows], strict=True))


def layers_in_order(places: Sequence[Hashable], buffers: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields the part of every layer, in order, of buffers [layers of the place, ..] that are one for each place."""
    parts = {place: iter(buffer) for place, buffer in zip(dict.fromkeys(places), buffers, strict=True)}
    for place in places:
        yield next(parts[place])


class TreeCache(Cache):
    """The cache of one request, with room for prompt, new tokens and the largest tree: a row of a `SharedCache`.

    Attributes:
        buffers: one for each place, [its layers, 2, 1, H, C, d], views of the shared ones.
        keys, values: of every layer, [1, H, C, d].
        layers: those of the text model in order.
    """

    def __init__(self, shared: SharedCache, row: int) -> None:
        self.shared, self.row = shared, row
        self._look_up()
        self.attention = [BufferLayer(keys, values) for keys, values in zip(self.keys, self.values, strict=True)]
        super().__init__(layers=self.all_layers())

    def _look_up(self) -> None:
        self.buffers = [buffer.narrow(2, self.row, 1) for buffer in self.shared.buffers]
        rows = list(layers_in_order(self.shared.places, self.buffers))
        self.keys, self.values = [row[0] for row in rows], [row[1] for row in rows]

    def all_layers(self) -> list[Any]:
        """Returns the layers of the cache, given those with attention."""
        return list(self.attention)

    def refresh(self) -> None:
        """Looks up the row again after the shared buffers have been replaced."""
        self._look_up()
        for layer, keys, values in zip(self.attention, self.keys, self.values, strict=True):
            layer.keys, layer.values = keys, values

    def tensors(self) -> dict[str, Any]:
        """Returns the buffers as arguments of a pass."""
        return {"keys": self.keys, "values": self.values}

    @property
    def capacity(self) -> int:
        """Number of tokens C that fit."""
        return self.shared.capacity

    @property
    def length(self) -> int:
        """Number of cached tokens S."""
        return self.layers[0].length

    def reserve(self, count: int, hidden: int = 0) -> int:
        """Counts `count` more tokens as cached, whose rows a pass writes itself; returns the first of them.

        Args:
            hidden: number of the last cached tokens that are not visible to all of the new ones.
        """
        first = self.length
        self.set_length(first + count)
        return first

    def set_length(self, length: int) -> None:
        """Sets the number of cached tokens, whose rows a pass writes itself."""
        for layer in self.layers:
            layer.length = length

    def crop_to(self, length: int) -> None:
        """Drops all tokens from position `length` on; all of them if the cache cannot go back to there."""
        self.set_length(length)

    def mark(self) -> None:
        """Lets `crop_to` go back to the present length, if the cache could not otherwise."""

    def assume(self, length: int) -> None:
        """Counts `length` tokens as cached, whatever the buffers hold; for measurements."""
        self.set_length(length)

    def grow_to(self, capacity: int) -> None:
        """Grows the buffers to `capacity` tokens; keeps the cached ones."""
        self.shared.grow_to(capacity)

    def zero_to(self, length: int) -> None:
        """Replaces the contents by `length` tokens of zeros."""
        for buffer in self.buffers:
            buffer[..., :length, :] = 0
        self.set_length(length)

    def keep_path(self, start: int, path: Sequence[int]) -> None:
        """Keeps the rows of `path` among the tree rows from `start` on, and drops the others.

        Args:
            start: length before the tree was written.
            path: increasing node indices of the accepted path, the root (0) first.
        """
        end = start + len(path)
        if path[-1] != len(path) - 1:
            for buffer in self.buffers:
                rows = cached_index(tuple(path), buffer.device)
                tree = buffer.narrow(-2, start, self.length - start)
                tree.narrow(-2, 0, len(path)).copy_(tree.index_select(-2, rows))
        self.crop_to(end)


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
        """[T, ..] -> [B, N, ..]."""
        return flat.index_select(0, self.places.flatten()).unflatten(0, tuple(self.places.shape))

    def unpad(self, padded: Tensor) -> Tensor:
        """[B, N, ..] -> [T, ..]."""
        return padded.flatten(0, 1).index_select(0, self.owners * self.places.shape[1] + self.offsets)


def by_row(visible: Tensor, queries: Queries | None) -> Tensor:
    """Returns what T queries attend to, Bool [T, S], by row, [B, N, S]; as it is for a single row."""
    return visible if queries is None else queries.pad(visible)


def tile_mask(visible: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Bool [N, S] or [B, N, S] (True = attend) -> additive float [1 or B, 1, group * N, S], rows ordered like folded heads.

    The row stride is a multiple of 8 elements: otherwise the fused kernel copies the mask in every layer. While a function is
    exported its sizes are symbols, which the alignment would specialize.
    """
    lowest, hidden = torch.finfo(dtype).min, ~visible
    if torch.compiler.is_exporting():
        additive = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(hidden, lowest)
        return additive.repeat(group, 1)[None, None] if additive.dim() == 2 else additive[:, None].repeat(1, 1, group, 1)
    *batch, nodes, keys = visible.shape
    shape = (batch[0] if batch else 1, 1, group * nodes, -(-keys // MASK_ALIGNMENT) * MASK_ALIGNMENT)
    mask = torch.zeros(shape, dtype=dtype, device=visible.device)[..., :keys]
    mask.unflatten(2, (group, nodes)).masked_fill_(hidden if not batch else hidden[:, None, None], lowest)
    return mask


class _PackedLayer(BufferLayer):
    def __init__(self, keys: Tensor, values: Tensor, place: Sequence[Tensor], length: int) -> None:
        super().__init__(keys, values)
        self.place, self.length = tuple(place), length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if buffer.shape[0] == 1:
                buffer.index_copy_(2, self.place[0], states)
            else:
                buffer.index_put_(self.place, states[0].transpose(0, 1))
        return self.keys.narrow(2, 0, self.length), self.values.narrow(2, 0, self.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0


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
        placed: dict[Any, list[Tensor]] = {}  # by device and number of heads
        for device, count in dict.fromkeys((layer.device, layer.shape[1]) for layer in keys):
            place = [columns]
            if keys[0].shape[0] > 1:
                place = [owners[:, None], torch.arange(count, device=owners.device)[None], columns[:, None]]
            placed[device, count] = [index.to(device) for index in place]
        layers = zip(keys, values, strict=True)
        super().__init__(layers=[_PackedLayer(k, v, placed[k.device, k.shape[1]], length) for k, v in layers])
        self.queries = queries

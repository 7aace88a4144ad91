"""KV caches of several requests as rows of one buffer, and their use within one pass (see `sage.runtime.joint`).

Shapes: B rows, H KV heads, C capacity, S keys, d head size, T queries of all requests, N queries of a request at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from sage.runtime.cache import RowLayer, TreeCache, grown, layers_in_order


class SharedCache:
    """The caches of several requests as rows of one buffer, so that a pass can read them together.

    Rows are zeroed when a request takes them: a pass attends to places that it must not see with a weight of 0, and 0 times the
    NaN of an earlier request is NaN.

    Args:
        like: a cache of one request, whose layers the rows have.
        num_rows: B.

    Attributes:
        buffers: one for each device, [layers of the device, 2, B, H, C, d].
        steps: LongTensor [C], 0, 1, 2, ..
    """

    def __init__(self, like: TreeCache, num_rows: int) -> None:
        self.num_rows, self.devices = num_rows, like.devices
        self.buffers = [
            torch.zeros(*one.shape[:2], num_rows, *one.shape[3:], dtype=one.dtype, device=one.device) for one in like.buffers
        ]
        self._rows: list[CacheRow | None] = [None] * num_rows
        self._set_layers()

    @property
    def capacity(self) -> int:
        """Number of tokens C that fit into each row."""
        return int(self.buffers[0].shape[-2])

    def take(self, capacity: int) -> CacheRow:
        """Returns the first free row as an empty cache of at least `capacity` tokens."""
        self.grow_to(capacity)
        row = self._rows.index(None)
        cache = self._rows[row] = CacheRow(self, row)
        cache.zero_to(cache.capacity)
        cache.crop_to(0)
        return cache

    def release(self, cache: CacheRow) -> None:
        """Frees a row."""
        self._rows[cache.row] = None

    def grow_to(self, capacity: int) -> None:
        """Grows all rows to `capacity` tokens; keeps the cached ones."""
        if capacity <= self.capacity:
            return
        self.buffers = grown(self.buffers, capacity)
        self._set_layers()
        for row in self._rows:
            if row is not None:
                row.refresh()

    def _set_layers(self) -> None:
        self.steps = torch.arange(self.capacity, device=self.buffers[0].device)
        self._layers: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def layers(self, num_rows: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns keys and values of every layer, [num_rows, H, C, d], of the first rows."""
        if num_rows not in self._layers:
            found = list(layers_in_order(self.devices, [buffer.narrow(2, 0, num_rows) for buffer in self.buffers]))
            self._layers[num_rows] = ([layer[0] for layer in found], [layer[1] for layer in found])
        return self._layers[num_rows]

    def addresses(self) -> set[int]:
        """Returns the addresses of the first layer's keys in every row."""
        return {self.buffers[0][0, 0, row].data_ptr() for row in range(self.num_rows)}


class CacheRow(TreeCache):
    """The cache of one request, a row of a `SharedCache`."""

    def __init__(self, shared: SharedCache, row: int) -> None:
        self.shared, self.row, self.devices = shared, row, shared.devices
        self.buffers = self._views()
        self._make_layers()

    def _views(self) -> list[Tensor]:
        return [buffer.narrow(2, self.row, 1) for buffer in self.shared.buffers]

    def refresh(self) -> None:
        """Looks up the row again after the shared buffers have been replaced."""
        self.buffers = self._views()
        self._set_rows()

    def grow_to(self, capacity: int) -> None:
        self.shared.grow_to(capacity)


@dataclass(frozen=True)
class JointQueries:
    """The queries of a joint pass: of each of T its row and its place in it, LongTensor [T], and the reverse, [B, N]."""

    owners: Tensor
    offsets: Tensor
    places: Tensor

    def pad(self, flat: Tensor) -> Tensor:
        """Returns states [1, H, T, d] as [B, H, N, d]."""
        rows, size = self.places.shape
        return flat[0].index_select(1, self.places.reshape(-1)).unflatten(1, (rows, size)).transpose(0, 1)

    def unpad(self, padded: Tensor) -> Tensor:
        """Returns states [B, H, N, d] as [1, T, H, d]."""
        queries = self.owners * self.places.shape[1] + self.offsets
        return padded.transpose(1, 2).flatten(0, 1).index_select(0, queries)[None]


class _JointRows(RowLayer):
    def __init__(self, keys: Tensor, values: Tensor, place: Sequence[Tensor], length: int) -> None:
        super().__init__(keys, values, place[2], length)
        self.place = tuple(place)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_put_(self.place, key_states[0].transpose(0, 1))
        self.values.index_put_(self.place, value_states[0].transpose(0, 1))
        return self.keys.narrow(2, 0, self.length), self.values.narrow(2, 0, self.length)


class JointCache(Cache):
    """The rows of a `SharedCache` within one joint pass; nothing in it is a number of the host (see `sage.runtime.joint`).

    Args:
        keys, values: of every layer, [B, H, C, d].
        owners, rows: LongTensor [T], where each token is written: the request's row, and the place in it.
        length: S, the number of places that the pass attends to.
        queries: of the pass.
    """

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        owners: Tensor,
        rows: Tensor,
        length: int,
        queries: JointQueries,
    ) -> None:
        heads = torch.arange(keys[0].shape[1], device=owners.device)
        place = (owners[:, None], heads[None], rows[:, None])
        placed = {device: [index.to(device) for index in place] for device in dict.fromkeys(layer.device for layer in keys)}
        layers = zip(keys, values, strict=True)
        super().__init__(layers=[_JointRows(key, value, placed[key.device], length) for key, value in layers])
        self.queries = queries

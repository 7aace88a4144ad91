"""KV caches of several requests as rows of one buffer, so that a pass can read them together (`sage.runtime.packed`).

Shapes: B rows, H KV heads, C capacity, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sage.runtime.cache import TreeCache, grown, layers_in_order


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

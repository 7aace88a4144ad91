"""Caches of targets some of whose layers are linear: keys and values of the others, and `LinearStates`.

Tokens since the base states are pending: they can be dropped, and those of an accepted path are folded into the states when the
next pass begins. A cache that is cropped below its base states goes back to the marked ones, or becomes empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from sage.runtime.cache import BufferLayer, LayerSize, PackedCache, SharedCache, TreeCache
from sage.runtime.linear_states import SLOTS, LinearSizes, LinearStates, Window, heads_of, tree_delta_rule


class _Counter(BufferLayer):
    """A linear layer in a cache: its number of tokens."""

    def __init__(self) -> None:
        super().__init__(torch.empty(0), torch.empty(0))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a linear layer has no keys")

    def get_max_length(self) -> int:
        return -1


def _with_counters(attention: Sequence[Any], sizes: LinearSizes) -> list[Any]:
    """Returns the layers of a cache in order, given those with attention."""
    rest = iter(attention)
    count = len(sizes.layers) + len(attention)
    return [_Counter() if layer in sizes.layers else next(rest) for layer in range(count)]


class SharedRecurrentCache(SharedCache):
    """Buffers and states of several requests; arguments as of `SharedCache`.

    Args:
        linear: sizes of the linear layers.
        devices: of each text layer. The states are on the first one, and copied to that of a layer in every pass.
    """

    def __init__(
        self,
        linear: LinearSizes,
        devices: Sequence[torch.device],
        sizes: Sequence[LayerSize],
        capacity: int,
        dtype: torch.dtype,
        num_rows: int = 1,
    ) -> None:
        self.sizes, self._arguments = linear, (linear, devices, sizes, capacity, dtype)
        self.states = LinearStates.zeros(linear, num_rows, SLOTS, dtype, devices[0])
        attention = [device for layer, device in enumerate(devices) if layer not in linear.layers]
        super().__init__(attention or devices[:1], sizes, capacity, dtype, num_rows)  # of no use if all are linear

    def with_rows(self, num_rows: int) -> SharedRecurrentCache:
        return SharedRecurrentCache(*self._arguments, num_rows)

    def _new_row(self, row: int) -> RecurrentCache:
        return RecurrentCache(self, row)

    def tensors(self, num_rows: int) -> dict[str, Any]:
        return super().tensors(num_rows) | vars(self.states.rows(0, num_rows))

    def grow_slots(self, slots: int) -> None:
        """Adds slots to all rows."""
        self.states = self.states.grown(slots)
        self._refresh_rows()


class RecurrentCache(TreeCache):
    """The cache of one request.

    Attributes:
        pending: number of tokens since the base states.
        marked: a number of tokens and the base states after them; None unless `mark` was called.
    """

    shared: SharedRecurrentCache
    states: LinearStates
    pending = 0
    marked: tuple[int, tuple[Tensor, Tensor]] | None = None

    def _look_up(self) -> None:
        super()._look_up()
        self.sizes, self.states = self.shared.sizes, self.shared.states.rows(self.row)

    def all_layers(self) -> list[Any]:
        return _with_counters(self.attention, self.sizes)

    def tensors(self) -> dict[str, Any]:
        return super().tensors() | vars(self.states)

    def mix(self, layer: Any, inputs: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Runs a layer over a prompt by the model's own chunked kernel, [1, T, C] -> [1, T, H, dv].

        Args:
            decay: [1, T, H], logarithms.
            beta: [1, T, H].
        """
        self._fold()
        place, kept = self.sizes.layers.index(layer.layer_idx), self.sizes.kernel - 1
        before, state = self.states.linear_inputs[:, place, :kept], self.states.linear_state[:, place]
        joined = torch.cat((before.to(inputs.device), inputs), 1)
        mixed = nn.functional.conv1d(joined.transpose(1, 2), layer.conv1d.weight, layer.conv1d.bias, groups=joined.shape[-1])
        query, key, value = heads_of(layer, ACT2FN[layer.activation](mixed.transpose(1, 2)))
        out, last = layer.chunked_rule(query, key, value, decay, beta, state.to(inputs.device))
        before.copy_(joined[:, -kept:])
        state.copy_(last)
        self.layers[layer.layer_idx].length += inputs.shape[1]
        return out

    def _fold(self) -> None:
        if self.pending:
            self.states.fold(self.pending)
            self.pending = 0

    def reserve(self, count: int, hidden: int = 0) -> int:
        if not hidden:
            self._fold()
        assert self.pending == hidden, "nodes of an earlier pass that the next one does not see"
        self.pending += count
        if self.pending > self.states.slots:
            self.shared.grow_slots(-(-self.pending // SLOTS) * SLOTS)
        return super().reserve(count)

    def crop_to(self, length: int) -> None:
        dropped = self.length - length
        if dropped > self.pending:
            self._go_back(length)
        else:
            self.pending -= dropped
            self.set_length(length)

    @torch.inference_mode()
    def _go_back(self, most: int) -> None:
        """Returns to the marked states, if these have at most so many tokens, or to the first ones."""
        length, copied = self.marked or (0, None)
        if copied is None or length > most:
            self.states.zero()
            length = 0
        else:
            self.states.restore(copied)
        self.assume(length)

    def mark(self) -> None:
        self._fold()
        self.marked = self.length, self.states.copy()

    def assume(self, length: int) -> None:
        self.pending = 0
        self.set_length(length)

    def zero_to(self, length: int) -> None:
        self.states.zero()
        self.pending, self.marked = 0, None
        super().zero_to(length)

    def keep_path(self, start: int, path: Sequence[int]) -> None:
        if path[-1] != len(path) - 1:
            self.states.keep(self.pending - self.length + start, path)
        super().keep_path(start, path)


class PackedRecurrentCache(PackedCache):
    """The buffers of a cache within a pass over nodes; arguments as of `PackedCache`.

    Args:
        states: of the rows of the pass.
        window: what the nodes see.
    """

    def __init__(self, *args: Any, sizes: LinearSizes, states: LinearStates, window: Window) -> None:
        super().__init__(*args)
        self.sizes, self.states, self.window = sizes, states, window
        self.layers: list[Any] = _with_counters(self.layers, sizes)

    def mix(self, layer: Any, inputs: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Runs a layer over the nodes of the pass; arguments as of `RecurrentCache.mix`."""
        place, device = self.sizes.layers.index(layer.layer_idx), self.window.visible.device
        moved, decay, beta = (part[0].to(device) for part in (inputs, decay, beta))
        return tree_delta_rule(layer, place, moved, decay, beta, self.states, self.window)[None].to(inputs)

"""What the linear layers of a target keep of the tokens of a request: a state, and what each token since then adds to it.

A layer folds its tokens into one state, S <- decay S + k u^T with u = beta (v - (decay S)^T k), after a convolution over its
last inputs. A state per node would take heads x dk x dv numbers. Kept instead is what a node adds: its key, its update u, its
decay and the input of its convolution. The state at a node is the base state and what its ancestors add, so all nodes of a tree
are computed together (`sage.runtime.delta_rule`), and the accepted path is folded into the base state before the next pass.

Shapes: B rows, L linear layers, P slots, K kernel, C channels, H value heads, G key heads, dk, dv head sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sage.runtime.host_tensors import cached_index

SLOTS = 16  # of a new cache; more are added as trees need them


@dataclass(frozen=True)
class LinearSizes:
    """Sizes of a target's linear layers.

    Attributes:
        layers: their indices among the text layers.
        kernel: K, inputs of the convolution.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int

    @staticmethod
    def of(text_config: Any, kind: str) -> LinearSizes | None:
        """Returns the sizes of the layers of a type; None without any."""
        layers = [layer for layer, each in enumerate(getattr(text_config, "layer_types", None) or ()) if each == kind]
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        return LinearSizes(tuple(layers), *(getattr(text_config, f"linear_{name}") for name in names)) if layers else None

    @property
    def channels(self) -> int:
        """C, the channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    def num_bytes(self, itemsize: int) -> tuple[int, int]:
        """Returns the bytes of a request's states, and of each of its slots, for a model of `itemsize` bytes per number."""
        state, exact = self.value_heads * self.key_size * self.value_size, max(itemsize, torch.float32.itemsize)
        slot = self.key_heads * self.key_size + self.value_heads * (self.value_size + 2)
        inputs = self.channels * itemsize
        layers = len(self.layers)
        return layers * (state * exact + (self.kernel - 1) * inputs), layers * (slot * exact + inputs)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of states: at least float32."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class LinearStates:
    """The states of several rows.

    Attributes:
        linear_state: [B, L, H, dk, dv], the base state.
        linear_inputs: [B, L, K - 1 + P, C], inputs of the convolution: those before the base, then those of the slots.
        linear_keys: [B, L, P, G, dk], normalized.
        linear_updates: [B, L, P, H, dv].
        linear_decays: [B, L, P, 2, H], logarithms of the token's own decay, and of its product along the path from the base.
    """

    linear_state: Tensor
    linear_inputs: Tensor
    linear_keys: Tensor
    linear_updates: Tensor
    linear_decays: Tensor

    @staticmethod
    def zeros(sizes: LinearSizes, rows: int, slots: int, dtype: torch.dtype, device: torch.device) -> LinearStates:
        """Returns states before the first token."""
        heads, dk, dv = sizes.value_heads, sizes.key_size, sizes.value_size
        shapes = [(heads, dk, dv), (sizes.kernel - 1 + slots, sizes.channels), (slots, sizes.key_heads, dk)]
        shapes += [(slots, heads, dv), (slots, 2, heads)]
        dtypes, exact = [accumulated(dtype)] * len(shapes), (rows, len(sizes.layers))
        dtypes[1] = dtype
        return LinearStates(
            *(torch.zeros(*exact, *shape, dtype=d, device=device) for shape, d in zip(shapes, dtypes, strict=True))
        )

    @property
    def slots(self) -> int:
        """Number of slots P."""
        return int(self.linear_keys.shape[2])

    def rows(self, first: int, count: int = 1) -> LinearStates:
        """Returns views of some rows."""
        return LinearStates(*(values.narrow(0, first, count) for values in vars(self).values()))

    def grown(self, slots: int) -> LinearStates:
        """Returns copies with more slots."""
        state, *others = vars(self).values()
        missing = slots - self.slots
        padded = [torch.nn.functional.pad(values, (0, 0) * (values.dim() - 3) + (0, missing)) for values in others]
        return LinearStates(state, *padded)

    def zero(self) -> None:
        """Returns to the state before the first token."""
        for values in vars(self).values():
            values.zero_()

    def copy(self) -> tuple[Tensor, Tensor]:
        """Returns copies of the base state and of its inputs."""
        return self.linear_state.clone(), self.linear_inputs[:, :, : self.linear_inputs.shape[2] - self.slots].clone()

    def restore(self, copied: tuple[Tensor, Tensor]) -> None:
        """Returns to what `copy` has returned."""
        self.linear_state.copy_(copied[0])
        self.linear_inputs[:, :, : copied[1].shape[2]] = copied[1]

    def fold(self, count: int) -> None:
        """Adds the first `count` slots of one row, a chain, to its base state."""
        state, keys, updates = self.linear_state[0], self.linear_keys[0, :, :count], self.linear_updates[0, :, :count]
        decays = self.linear_decays[0, :, :count, 1]
        total = decays[:, -1]
        later = (total[:, None] - decays).exp()[..., None]  # [L, count, H, 1], the decay after each token
        weighted = keys.repeat_interleave(later.shape[2] // keys.shape[2], 2) * later
        state.mul_(total.exp()[..., None, None])
        state += torch.einsum("lthk,lthv->lhkv", weighted, updates)
        inputs = self.linear_inputs[0]
        kept = inputs.shape[1] - self.slots
        inputs[:, :kept] = inputs[:, count : count + kept].clone()

    def keep(self, first: int, path: Sequence[int]) -> None:
        """Moves the slots of `path`, counted from slot `first` on, to the front of these."""
        index = cached_index(tuple(first + node for node in path), self.linear_keys.device)
        for values in list(vars(self).values())[1:]:
            offset = values.shape[2] - self.slots
            values[:, :, offset + first : offset + first + len(path)] = values.index_select(2, index + offset)

"""What the linear layers of a target keep of a request: a state, and what each token since then adds to it.

A layer folds its tokens into one state, S <- decay S + k u^T with u = beta (v - (decay S)^T k), after a convolution over its
last inputs. A state per node would take heads x dk x dv numbers. Kept instead is what a node adds: its key, its update u, its
decay and the input of its convolution. The state at a node is the base state and what its ancestors add, so all nodes of a tree
are computed together, by the chunked form of the rule with ancestors in place of earlier tokens: the updates of the nodes are
the solution of a triangular system, because parents come before children. The accepted path is folded into the base state
before the next pass. Ref: Gated Delta Networks, arXiv 2412.06464, section 3.3.

    node        0 1 2 3     parents  -1 0 0 1     base inputs a b c, kernel 4
    convolution at node 3:  c 0 1 3               at node 2:  b c 0 2

Shapes: B rows, L linear layers, P slots, K kernel, C channels, H value heads, G key heads, dk, dv head sizes; T nodes of all
requests, N nodes of a request at most, X columns that nodes see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from sage.runtime.cache import Queries
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
        new = partial(torch.zeros, rows, len(sizes.layers), device=device, dtype=torch.promote_types(dtype, torch.float32))
        inputs = new(sizes.kernel - 1 + slots, sizes.channels, dtype=dtype)
        keys = new(slots, sizes.key_heads, dk)
        return LinearStates(new(heads, dk, dv), inputs, keys, new(slots, heads, dv), new(slots, 2, heads))

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


EPSILON = 1e-6  # of the norm of queries and keys


@dataclass
class Window:
    """What the nodes of a pass see of the tokens since the base states of their rows.

    Attributes:
        visible: BoolTensor [T, X], the slots on the path of each node, itself among them.
        slots: LongTensor [T], the slot of each node.
        owners: LongTensor [T], the row of each node.
        queries: of a pass over several rows.
        kernel: K.
    """

    visible: Tensor
    slots: Tensor
    owners: Tensor
    queries: Queries | None
    kernel: int

    @cached_property
    def taps(self) -> Tensor:
        """LongTensor [T, K], the inputs of each node's convolution in its row's `linear_inputs`, the oldest first."""
        marked = torch.arange(self.visible.shape[1], device=self.visible.device).masked_fill(~self.visible, -1)
        marked = nn.functional.pad(marked, (0, self.kernel), value=-1)
        latest = marked.topk(self.kernel, -1).values
        before = torch.arange(self.kernel, device=marked.device) - self.visible.sum(-1, keepdim=True)
        return torch.where(latest < 0, self.kernel - 2 - before, latest + self.kernel - 1).flip(-1)

    @cached_property
    def seen(self) -> Tensor:
        """BoolTensor [B, N, X]."""
        return self.pad(self.visible)

    def pad(self, flat: Tensor) -> Tensor:
        """[T, ..] -> [B, N, ..]."""
        return flat[None] if self.queries is None else self.queries.pad(flat)

    def unpad(self, padded: Tensor) -> Tensor:
        """[B, N, ..] -> [T, ..]."""
        return padded[0] if self.queries is None else self.queries.unpad(padded)


def _convolve(layer: Any, inputs: Tensor) -> Tensor:
    """[.., K, C], the last inputs of each token -> [.., C]."""
    weight = layer.conv1d.weight.squeeze(1).t()
    mixed = (inputs * weight.to(inputs.dtype)).sum(-2, dtype=torch.promote_types(inputs.dtype, torch.float32))
    if layer.conv1d.bias is not None:
        mixed = mixed + layer.conv1d.bias
    return ACT2FN[layer.activation](mixed).to(inputs.dtype)


def heads_of(layer: Any, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[.., C] -> queries and keys [.., G, dk], values [.., H, dv]."""
    query, key, value = mixed.split((layer.key_dim, layer.key_dim, layer.value_dim), -1)
    sizes = (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim)
    query, key, value = (part.unflatten(-1, (-1, size)) for part, size in zip((query, key, value), sizes, strict=True))
    return query, key, value


def tree_delta_rule(
    layer: Any, place: int, inputs: Tensor, decay: Tensor, beta: Tensor, states: LinearStates, window: Window
) -> Tensor:
    """Runs one layer over the nodes; writes what they add to the state into their slots.

    Args:
        place: of the layer among the linear ones.
        inputs: [T, C], of the convolution.
        decay: [T, H], logarithms.
        beta: [T, H].

    Returns:
        [T, H, dv].
    """
    at, exact = (window.owners, place, window.slots), states.linear_state.dtype
    states.linear_inputs[window.owners, place, window.slots + window.kernel - 1] = inputs
    mixed = _convolve(layer, states.linear_inputs[window.owners[:, None], place, window.taps])
    query, key, value = (part.to(exact) for part in heads_of(layer, mixed))
    query, key = _normalized(query) * layer.head_k_dim**-0.5, _normalized(key)
    size = window.visible.shape[1]
    states.linear_keys[at], states.linear_decays[(*at, 0)] = key, decay.to(exact)
    total = window.seen.to(exact) @ states.linear_decays[:, place, :size, 0]  # [B, N, H]
    states.linear_decays[(*at, 1)] = window.unpad(total)
    later = total[:, :, None] - states.linear_decays[:, place, None, :size, 1]  # [B, N, X, H], after each ancestor
    later = later.masked_fill(~window.seen[..., None], -torch.inf).exp().permute(0, 3, 1, 2)
    group, total = value.shape[1] // key.shape[1], total.exp().transpose(1, 2)[..., None]
    keys, query, key = (
        part.repeat_interleave(group, 2).transpose(1, 2)
        for part in (states.linear_keys[:, place, :size], window.pad(query), window.pad(key))
    )
    base, beta, value = states.linear_state[:, place], window.pad(beta.to(exact)).transpose(1, 2)[..., None], window.pad(value)
    pairs = (key @ keys.transpose(-1, -2)) * later
    missing = value.transpose(1, 2) - total * (key @ base)
    if torch.compiler.is_exporting() or size > pairs.shape[2]:  # with nodes of earlier passes, of a target that is the draft
        states.linear_updates[at] = 0
        missing = missing - pairs @ states.linear_updates[:, place, :size].transpose(1, 2)
        pairs = pairs.gather(-1, window.pad(window.slots)[:, None, None].expand(*pairs.shape[:3], -1))
    updates = beta * missing
    if pairs.shape[2] > 1:  # a single node has no other's update to subtract
        updates = torch.linalg.solve_triangular(beta * pairs, updates, upper=False, unitriangular=True)
    states.linear_updates[at] = window.unpad(updates.transpose(1, 2))
    added = ((query @ keys.transpose(-1, -2)) * later) @ states.linear_updates[:, place, :size].transpose(1, 2)
    return window.unpad((total * (query @ base) + added).transpose(1, 2))


def _normalized(states: Tensor) -> Tensor:
    """Scales vectors [.., dk] to length 1."""
    return states * torch.rsqrt((states * states).sum(-1, keepdim=True) + EPSILON)

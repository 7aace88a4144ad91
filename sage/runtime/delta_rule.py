"""The gated delta rule over a tree: all nodes of a pass at once, each from the state of its own path.

The chunked form of the rule, with the ancestors of a node in place of the tokens before it: the updates of the nodes are the
solution of a triangular system, because parents come before children. Ref: Gated Delta Networks, arXiv 2412.06464, section 3.3.

    node        0 1 2 3     parents  -1 0 0 1     base inputs a b c, kernel 4
    convolution at node 3:  c 0 1 3               at node 2:  b c 0 2

Shapes: T nodes of all requests, B cache rows, N nodes of a request at most, X columns that nodes see, K kernel, C channels,
H value heads, G key heads, dk, dv head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from sage.runtime.linear_states import LinearStates
from sage.runtime.packed import Queries

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

    @cached_property
    def own(self) -> Tensor:
        """LongTensor [B, N], the slots of a row's nodes."""
        return self.pad(self.slots)

    def pad(self, flat: Tensor) -> Tensor:
        """[T, ..] -> [B, N, ..]."""
        if self.queries is None:
            return flat[None]
        return flat.index_select(0, self.queries.places.flatten()).unflatten(0, tuple(self.queries.places.shape))

    def unpad(self, padded: Tensor) -> Tensor:
        """[B, N, ..] -> [T, ..]."""
        if self.queries is None:
            return padded[0]
        return padded[self.owners, self.queries.offsets]


def convolve(layer: Any, inputs: Tensor) -> Tensor:
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


def normalized(states: Tensor) -> Tensor:
    """Scales vectors [.., dk] to length 1."""
    return states * torch.rsqrt((states * states).sum(-1, keepdim=True) + EPSILON)


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
    mixed = convolve(layer, states.linear_inputs[window.owners[:, None], place, window.taps])
    query, key, value = (part.to(exact) for part in heads_of(layer, mixed))
    query, key = normalized(query) * layer.head_k_dim**-0.5, normalized(key)
    size = window.visible.shape[1]
    states.linear_keys[at], states.linear_decays[(*at, 0)] = key, decay.to(exact)
    total = window.seen.to(exact) @ states.linear_decays[:, place, :size, 0]  # [B, N, H]
    states.linear_decays[(*at, 1)] = window.unpad(total)
    later = total[:, :, None] - states.linear_decays[:, place, None, :size, 1]  # [B, N, X, H], after each ancestor
    later = later.masked_fill(~window.seen[..., None], -torch.inf).exp().permute(0, 3, 1, 2)
    group, total = value.shape[1] // key.shape[1], total.exp().transpose(1, 2)[..., None]
    keys, query, key = (
        _by_head(part, group) for part in (states.linear_keys[:, place, :size], window.pad(query), window.pad(key))
    )
    base, beta, value = states.linear_state[:, place], window.pad(beta.to(exact)).transpose(1, 2)[..., None], window.pad(value)
    pairs = (key @ keys.transpose(-1, -2)) * later
    missing = value.transpose(1, 2) - total * (key @ base)
    if torch.compiler.is_exporting() or size > pairs.shape[2]:  # with nodes of earlier passes, of a target that is the draft
        states.linear_updates[at] = 0
        missing = missing - pairs @ states.linear_updates[:, place, :size].transpose(1, 2)
        pairs = pairs.gather(-1, window.own[:, None, None].expand(*pairs.shape[:3], -1))
    updates = beta * missing
    if pairs.shape[2] > 1:  # a single node has no other's update to subtract
        updates = torch.linalg.solve_triangular(beta * pairs, updates, upper=False, unitriangular=True)
    states.linear_updates[at] = window.unpad(updates.transpose(1, 2))
    added = ((query @ keys.transpose(-1, -2)) * later) @ states.linear_updates[:, place, :size].transpose(1, 2)
    return window.unpad((total * (query @ base) + added).transpose(1, 2))


def _by_head(states: Tensor, group: int) -> Tensor:
    """[B, T, G, dk] -> [B, H, T, dk]."""
    return states.repeat_interleave(group, 2).transpose(1, 2)

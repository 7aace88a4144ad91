"""Attention of drafts in training: from many positions of complete sequences in one pass, as decoding computes it for each.

`Chains` is the attention of an unrolled draft. Worked example, three steps over pairs 0..3. Row s of step i is pair s + i of
the chain whose root is pair s:

    step 0, row 2: pair 2                   attends to step 0's pairs 0 1 2
    step 1, row 2: pair 3 of root 2         attends to step 0's pairs 0 1 2, and to itself
    step 2, row 1: pair 3 of root 1         attends to step 0's pairs 0 1, to step 1's row 1 (pair 2), and to itself

So row s attends to the keys 0..s of step 0, causally, and to row s of each earlier step: rows are aligned and no mask is
needed. The few keys of the chain enter the causal attention as one additional key of every row, whose score is their
log-sum-exp.

Training needs only the rows whose chains reach a supervised pair. With `roots` = [1 3], rows 1 and 3 of every step are
computed; step 0 still provides the keys of all pairs, and a mask replaces the causal order of the queries.

`Rollout` is the attention of drafts of several tokens in one pass. A rollout starts at a pair, its root, and continues with
slots at the positions after it. Its rows are the root at step 0 and the slots at the steps from 1 on. A row attends to the
pairs up to its root and to the slots of its own rollout up to itself. Worked example, five pairs, rollouts from pairs 1 and 3,
of which the first has two slots and the second one (`sizes` = [2, 2, 1]):

                       pairs 0 1 2 3 4   slots 1.1 3.1 1.2
    row of root 1            1 1 . . .          .   .   .
    row of root 3            1 1 1 1 .          .   .   .
    slot 1.1                 1 1 . . .          1   .   .
    slot 3.1                 1 1 1 1 .          .   1   .
    slot 1.2                 1 1 . . .          1   .   1

Ref: P-EAGLE, arXiv 2602.01469; the mask is that of its published training.

Shapes: B batch, P pairs, R roots, or rows of rollouts (sum of `sizes`), H query heads, C key heads, G heads per key head, T
rows, I keys of the chain, A rollouts, K steps, M = R - A slots, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sage.runtime.attention import causal_attention
from sage.runtime.cache import tile_mask

EXTRA = 8  # additional columns: two are used, and fused kernels need a multiple of eight


class Chains:
    """Keys and values of the steps so far, passed in place of a cache.

    Args:
        weight: [B, P], factor of each value of step 0, the same for all heads; None for 1.
        roots: LongTensor [B, R], the rows to compute, different in each sequence; None for all.

    Attributes:
        first: keys and values [B, C, P, d] of step 0.
        later: keys and values of each later step, [B, C, P - i, d], or [B, C, R, d] with roots.
    """

    def __init__(self, weight: Tensor | None = None, roots: Tensor | None = None) -> None:
        self.weight, self.roots = weight, roots
        self.first: tuple[Tensor, Tensor] | None = None
        self.later: list[tuple[Tensor, Tensor]] = []
        self._mask: Tensor | None = None

    @property
    def selects_queries(self) -> bool:
        """Whether the next step computes the rows of the roots only, for which all pairs are keys: step 0."""
        return self.first is None and self.roots is not None

    def queries(self, states: Tensor, dim: int = 1) -> Tensor:
        """Returns the rows to compute of states with an entry per key in dimension `dim`: those of the roots in step 0."""
        return at_rows(states, self.roots, dim) if self.first is None and self.roots is not None else states

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the attention [B, H, T, d] of the next step.

        Args:
            query: [B, H, T, d], rope applied; key, value: [B, C, T, d], or [B, C, P, d] in step 0.
        """
        if self.first is None:
            value = value if self.weight is None else value * self.weight[:, None, :, None]
            self.first = (key, value)
            if self.roots is None:
                return causal_attention(query, key, value)
            keys = torch.arange(key.shape[2] + 1, device=key.device)  # the last one is that of the chain
            is_visible = (keys <= self.roots[..., None]) | (keys == key.shape[2])
            self._mask = tile_mask(is_visible, query.shape[1] // key.shape[1], query.dtype)  # [B, 1, G * R, P + 1]
            return _masked_attention(query, key, value, self._mask[..., : key.shape[2]])
        self.later.append((key, value))
        rows = query.shape[2]
        keys, values = (torch.stack([states[:, :, :rows] for states in step], 3) for step in zip(*self.later, strict=True))
        if self._mask is not None:
            return attend_with_chain(query, *self.first, keys, values, self._mask)
        first_key, first_value = (states[:, :, :rows] for states in self.first)
        return attend_with_chain(query, first_key, first_value, keys, values)


def at_rows(states: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Returns the entries `rows` [B, R] of dimension `dim` >= 1; `states` [B, ..] or, for all sequences, [1, ..]."""
    shape = [1] * states.dim()
    shape[0], shape[dim] = rows.shape
    sizes = list(states.shape)
    sizes[0], sizes[dim] = rows.shape
    return states.expand(len(rows), *states.shape[1:]).gather(dim, rows.view(shape).expand(sizes))


def _masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Attention of [B, H, R, d] to [B, C, S, d] under a mask [B, 1, G * R, S], with grouped heads folded into the rows."""
    folded = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    out = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return out.reshape(*query.shape[:-1], -1)


def attend_with_chain(
    query: Tensor, key: Tensor, value: Tensor, chain_key: Tensor, chain_value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Returns the softmax attention [B, H, T, d] of each row over the keys up to it and over its own chain.

    One fused attention plus the chain's I keys per row, so that no [T, T] weights are stored. One more key, in front for causal
    attention and at the end under a mask, represents the chain: it is orthogonal to all others, its score in row s is
    l = log sum_i exp(q_s k_si), and its value is 1 in a separate column, where the fused attention leaves the chain's share
    exp(l) / (exp(l) + sum of the other exponentials).

    Args:
        query: [B, H, T, d]; key, value: [B, C, T, d]; chain_key, chain_value: [B, C, T, I, d].
        mask: additive [B, 1, G * T, P + 1] over `key` and `value` [B, C, P, d] and the key of the chain; None attends causally.
    """
    size, scale = query.shape[-1], query.shape[-1] ** -0.5
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = torch.einsum("bcgtd,bctid->bcgti", grouped.to(wide), chain_key.to(wide)) * scale
    of_chain = torch.einsum("bcgti,bctid->bcgtd", scores.softmax(-1).to(value.dtype), chain_value).flatten(1, 2)
    level = (scores.logsumexp(-1) / scale).flatten(1, 2)[..., None]
    high = level.to(query.dtype)
    low = (level - high.to(wide)).to(query.dtype)  # two numbers, so that bf16 holds the score to four digits
    longer = nn.functional.pad(torch.cat((query, high, low), -1), (0, EXTRA - 2))
    if mask is None:
        longer = nn.functional.pad(longer, (0, 0, 1, 0))
        out = causal_attention(longer, _with_row(key, 2, in_front=True), _with_row(value, 1, in_front=True), scale)[:, :, 1:]
    else:
        out = _masked_attention(longer, _with_row(key, 2), _with_row(value, 1), mask, scale)
    return out[..., :size] + out[..., size : size + 1] * of_chain


def _with_row(states: Tensor, num_ones: int, in_front: bool = False) -> Tensor:
    """[B, C, T, d] -> [B, C, T + 1, d + EXTRA]; the added row is zero except for `num_ones` ones after column d."""
    size = states.shape[-1]
    longer = nn.functional.pad(states, (0, EXTRA, 1, 0) if in_front else (0, EXTRA, 0, 1))
    longer[:, :, 0 if in_front else -1, size : size + num_ones] = 1
    return longer


def steps_of_rows(sizes: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns step and rollout of every row, LongTensor [R] each; step k has the first `sizes[k]` rollouts, not increasing."""
    steps = torch.cat([torch.full((size,), step, device=device) for step, size in enumerate(sizes)])
    return steps, torch.cat([torch.arange(size, device=device) for size in sizes])


def visible_to_rows(
    roots: Tensor, sizes: Sequence[int], num_pairs: int, is_root_slot: bool = False, is_causal: bool = True
) -> Tensor:
    """Returns what the rows of rollouts attend to, BoolTensor [B, R, P + M].

    Args:
        roots: LongTensor [B, A], pairs at which the rollouts start.
        sizes: as in `steps_of_rows`.
        is_root_slot: whether the row at step 0 is a slot, too, behind its root: then M = R.
        is_causal: whether a slot attends to the slots of its rollout up to itself, instead of to all of them.
    """
    step, rollout = steps_of_rows(sizes, roots.device)
    pairs = torch.arange(num_pairs, device=roots.device) <= roots[:, rollout, None]
    is_slot = slice(0 if is_root_slot else sizes[0], None)
    is_same = rollout[:, None] == rollout[is_slot]
    if is_causal:
        is_same &= step[is_slot] <= step[:, None]
    return torch.cat((pairs, is_same.expand(len(roots), -1, -1)), -1)


class Rollout(Chains):
    """Attention of one layer over pairs and slots, passed in place of a cache.

    Args:
        visible: [B, R, P + M] of `visible_to_rows`.
        num_rollouts: A.
        rows: LongTensor [B, R], the rows of pairs and slots to compute in the last layer; None for all of them.
        weight: [B, P], factors of the values of pairs; None for 1.
    """

    def __init__(self, visible: Tensor, num_rollouts: int, rows: Tensor | None, weight: Tensor | None) -> None:
        super().__init__(weight, rows)
        self.visible, self.num_slots = visible, visible.shape[1] - num_rollouts

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the attention of `query` [B, H, R, d], or [B, H, P + M, d] without `rows`, to [B, C, P + M, d]."""
        num_pairs = key.shape[2] - self.num_slots
        if self.weight is not None:
            value = value * nn.functional.pad(self.weight, (0, self.num_slots), value=1.0)[:, None, :, None]
        if self.roots is not None:
            return masked_attention(query, key, value, tile_mask(self.visible, 1, query.dtype))
        pairs = causal_attention(*(states[:, :, :num_pairs] for states in (query, key, value)))
        if not self.num_slots:
            return pairs
        mask = tile_mask(self.visible[:, -self.num_slots :], 1, query.dtype)
        slots = masked_attention(query[:, :, num_pairs:], key, value, mask)
        return torch.cat((pairs, slots), 2)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention under an additive mask [B, 1, rows, keys] that all heads share: repeated keys and values take less memory than
    a repeated mask.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (states[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for states in (key, value))
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

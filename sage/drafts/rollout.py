"""Attention of drafts of several tokens in one pass, from few anchors of complete sequences.

A rollout starts at a pair, its root, and continues with slots at the positions after it. Its rows are the root at step 0 and
the slots at the steps from 1 on. A row attends to the pairs up to its root and to the slots of its own rollout up to itself, as
in a causal pass over the pairs and the slots. Worked example, five pairs, rollouts from pairs 1 and 3, of which the first has
two slots and the second one (`sizes` = [2, 2, 1]):

                       pairs 0 1 2 3 4   slots 1.1 3.1 1.2
    row of root 1            1 1 . . .          .   .   .
    row of root 3            1 1 1 1 .          .   .   .
    slot 1.1                 1 1 . . .          1   .   .
    slot 3.1                 1 1 1 1 .          .   1   .
    slot 1.2                 1 1 . . .          1   .   1

Ref: P-EAGLE, arXiv 2602.01469; the mask is that of its published training.

Shapes: B batch, P pairs, A rollouts, K steps, R rows (sum of `sizes`), M = R - A slots, H query and C key heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sage.drafts.unroll import Chains
from sage.runtime.attention import causal_attention
from sage.runtime.cache import tile_mask


def steps_of_rows(sizes: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns step and rollout of every row, LongTensor [R] each.

    Args:
        sizes: number of rollouts that have each of the K steps, not increasing: step k has the first `sizes[k]` rollouts.
    """
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
    own = rollout[:, None] == rollout[is_slot]
    if is_causal:
        own &= step[is_slot] <= step[:, None]
    return torch.cat((pairs, own.expand(len(roots), -1, -1)), -1)


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
        """Computes the attention of the layer.

        Args:
            query: [B, H, R, d], or [B, H, P + M, d] without `rows`; rope applied.
            key, value: [B, C, P + M, d].

        Returns:
            like `query`.
        """
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

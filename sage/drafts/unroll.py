"""Attention of an unrolled draft: the attention of decoding a chain, for every position of a sequence in parallel.

Worked example, three steps over pairs 0..3. Row s of step i is pair s + i of the chain whose root is pair s:

    step 0, row 2: pair 2                   attends to step 0's pairs 0 1 2
    step 1, row 2: pair 3 of root 2         attends to step 0's pairs 0 1 2, and to itself
    step 2, row 1: pair 3 of root 1         attends to step 0's pairs 0 1, to step 1's row 1 (pair 2), and to itself

So row s attends to the keys 0..s of step 0, causally, and to row s of each earlier step: rows are aligned and no mask is
needed. The few keys of the chain enter the causal attention as one additional key of every row, whose score is their
log-sum-exp.

Shapes: B batch, H query heads, C key heads, G heads per key head, T rows, I keys of the chain, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sage.runtime.attention import causal_attention

EXTRA = 8  # additional columns: two are used, and fused kernels need a multiple of eight


class Chains:
    """Keys and values of the steps so far, passed in place of a cache.

    Args:
        weight: [B, P], factor of each value of step 0, the same for all heads; None for 1.

    Attributes:
        true: keys and values [B, C, P, d] of step 0.
        own: keys and values of each later step, [B, C, P - i, d].
    """

    def __init__(self, weight: Tensor | None = None) -> None:
        self.weight = weight
        self.true: tuple[Tensor, Tensor] | None = None
        self.own: list[tuple[Tensor, Tensor]] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Computes the attention of the next step.

        Args:
            query: [B, H, T, d], rope applied; key, value: [B, C, T, d].

        Returns:
            [B, H, T, d].
        """
        if self.true is None:
            value = value if self.weight is None else value * self.weight[:, None, :, None]
            self.true = (key, value)
            return causal_attention(query, key, value)
        self.own.append((key, value))
        rows = query.shape[2]
        true_key, true_value = (states[:, :, :rows] for states in self.true)
        keys, values = (torch.stack([states[:, :, :rows] for states in step], 3) for step in zip(*self.own, strict=True))
        return attend_with_chain(query, true_key, true_value, keys, values)


def attend_with_chain(query: Tensor, key: Tensor, value: Tensor, chain_key: Tensor, chain_value: Tensor) -> Tensor:
    """Softmax attention of each row over the keys up to it and over its own chain.

    One fused causal attention plus the chain's I keys per row, so that no [T, T] weights are stored. A key in front represents
    the chain: it is orthogonal to all others, its score in row s is l = log sum_i exp(q_s k_si), and its value is 1 in a
    separate column, where the fused attention leaves the chain's share exp(l) / (exp(l) + sum of the causal exponentials).

    Args:
        query: [B, H, T, d]; key, value: [B, C, T, d]; chain_key, chain_value: [B, C, T, I, d].

    Returns:
        [B, H, T, d].
    """
    size, scale = query.shape[-1], query.shape[-1] ** -0.5
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = torch.einsum("bcgtd,bctid->bcgti", grouped.to(wide), chain_key.to(wide)) * scale
    own = torch.einsum("bcgti,bctid->bcgtd", scores.softmax(-1).to(value.dtype), chain_value).flatten(1, 2)
    level = (scores.logsumexp(-1) / scale).flatten(1, 2)[..., None]
    high = level.to(query.dtype)
    low = (level - high.to(wide)).to(query.dtype)  # two numbers, so that bf16 holds the score to four digits
    out = causal_attention(
        nn.functional.pad(torch.cat((query, high, low), -1), (0, EXTRA - 2, 1, 0)),
        _with_first_row(key, num_ones=2),
        _with_first_row(value, num_ones=1),
        scale,
    )[:, :, 1:]
    return out[..., :size] + out[..., size : size + 1] * own


def _with_first_row(states: Tensor, num_ones: int) -> Tensor:
    """[B, C, T, d] -> [B, C, 1 + T, d + EXTRA]; the added first row is zero except for `num_ones` ones after column d."""
    size = states.shape[-1]
    longer = nn.functional.pad(states, (0, EXTRA, 1, 0))
    longer[:, :, 0, size : size + num_ones] = 1
    return longer

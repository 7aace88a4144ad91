"""Which predictions of a draft are compared with which positions of the target: rows, their chunks, and anchors.

A row is one prediction of the draft. Several rows may predict the same position: those of every step of an unrolled pass, or of
several blocks. Worked example, three positions of which the first has no chain of two tokens before it, chunks of four rows:

    position   0   1 1   2 2
    step       0   0 1   0 1
    chunk      1   1 1   2 2      chunks end with a position, so that each position belongs to one chunk

Anchors are the few positions of a sequence from which drafts are trained (`objective.anchors`). A chain is a draft of K tokens
from one pair, its root. The complete objective sums over the chains of all roots, the pairs from which a chain reaches a
supervised pair. With `objective.anchors` = A, each sequence draws A of its R roots without replacement, and the loss of their
chains is multiplied by R / A, the reciprocal of the probability of a root. The expectation of the loss and of its gradient is
therefore that of the complete objective; with R <= A all roots are taken. Worked example, two steps, one sequence:

    supervised   [. . 1 1 1 .]    roots 1 2 3 4
    A = 2        roots 1 and 4 are drawn; their rows: step 1 of root 1 (pair 2), step 0 of root 4 (pair 4), each twice as heavy

A draft of all steps in one pass may also drop some chains from each step on: `keep` = [1, 0.7, ..] computes step 1 of 0.7 A
chains, all of which have step 0. Their factor is R divided by the number of chains kept at the step.

Draws come from torch's global generator, whose state is part of a checkpoint and differs between ranks.

Ref: P-EAGLE, arXiv 2602.01469 (conditional dropping). Differs by: the factors, without which deeper steps would weigh less.

Shapes: B batch, P pairs, A anchors, K steps, R rows (of anchors: the kept chains of each step), S positions, N rows, D hidden.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

MAX_ROOTS = 0.8  # share of the pairs beyond which an unrolled pass computes all of them


class Part(NamedTuple):
    """Consecutive rows, and the positions that they predict."""

    rows: slice
    positions: slice


@dataclass(frozen=True)
class Rows:
    """The rows of a micro-batch, in the order of their positions; each belongs to one step of one chain.

    Attributes:
        position: LongTensor [R], not decreasing, among the S positions with a row.
        step: LongTensor [R], number of tokens drafted before the predicted one.
        counts: number of rows of each of the S positions, on the host, so that no chunk waits for the device.
        chain: LongTensor [R], the row's chain; `num_chains` of them exist.
        scale: [R], factor of the row's loss, the reciprocal of the probability with which its chain was drawn.
        among: LongTensor [S], the positions with a row among all supervised positions.
        num_supervised: number of these, a tensor [].
        is_complete: whether all chains were computed.
    """

    position: Tensor
    step: Tensor
    counts: Sequence[int]
    chain: Tensor
    scale: Tensor
    num_chains: int
    among: Tensor
    num_supervised: Tensor
    is_complete: bool = False

    def rows_per_position(self, part: Part) -> int | None:
        """Returns how many rows each position of a part has, None if not all have as many."""
        numbers = set(self.counts[part.positions])
        return numbers.pop() if len(numbers) == 1 else None

    def parts(self, size: int, within: Part | None = None) -> Iterator[Part]:
        """Divides all rows, or those of a part, into parts of at most `size` rows and positions, without splitting a position:
        one with more rows is a part of its own.
        """
        ends = self._ends
        first, last = (0, len(self.counts)) if within is None else (within.positions.start, within.positions.stop)
        while first < last:
            start = ends[first]
            stop = min(max(bisect_right(ends, start + size) - 1, first + 1), first + size, last)
            yield Part(slice(start, ends[stop]), slice(first, stop))
            first = stop

    @cached_property
    def _ends(self) -> list[int]:
        """Number of rows before each position, and of all."""
        return [0, *accumulate(self.counts)]


def indices_of(mask: Tensor, count: int) -> Tensor:
    """Returns the flat indices of the `count` true entries of a mask in increasing order, without device synchronization."""
    return (~mask).flatten().to(torch.uint8).argsort(stable=True)[:count]


@dataclass
class Anchors:
    """Roots that were drawn, in random order.

    Attributes:
        root_BA: LongTensor. A sequence with fewer roots is filled up with other pairs, whose factor is 0.
        sizes: number of chains computed at each step, the first ones of `root_BA`; the first number is A.
        scale_BR: factor of every row, the rows of step 0 first; 0 for a chain that is not kept.
        is_complete: whether nothing was drawn: these are all roots, in increasing order.
        has_all_pairs: whether they are even all pairs.
    """

    root_BA: Tensor
    sizes: tuple[int, ...]
    scale_BR: Tensor
    is_complete: bool = False
    has_all_pairs: bool = False

    def per_row(self, values_A: Tensor) -> Tensor:
        """Repeats values of the chains, [.., A], for the rows of every step: [.., R]."""
        return torch.cat([values_A[..., :size] for size in self.sizes], -1)

    @cached_property
    def step_R(self) -> Tensor:
        """LongTensor, step of every row."""
        device = self.root_BA.device
        return torch.cat([torch.full((size,), step, device=device) for step, size in enumerate(self.sizes)])

    @cached_property
    def pair_BR(self) -> Tensor:
        """LongTensor, the pair of every row."""
        return self.per_row(self.root_BA) + self.step_R


def is_root_of(mask_BP: Tensor, steps: int) -> Tensor:
    """Returns BoolTensor [B, P], the pairs from which a chain of at most K - 1 drafted tokens reaches a supervised pair."""
    before_BP = nn.functional.pad(mask_BP.cumsum(1), (1, 0))  # supervised pairs before each pair, and their total
    up_to_BP = torch.cat((before_BP[:, steps:], before_BP[:, -1:].expand(-1, steps - 1)), 1)[:, : mask_BP.shape[1]]
    return up_to_BP > before_BP[:, :-1]


def every_pair(mask_BP: Tensor, steps: int) -> Anchors:
    """Returns anchors at all pairs; those of step k are the pairs that have k more behind them."""
    batch, num_pairs = mask_BP.shape
    sizes = tuple(range(num_pairs, max(num_pairs - steps, 0), -1))
    root_BA = torch.arange(num_pairs, device=mask_BP.device).expand(batch, -1)
    scale_BR = torch.ones(batch, sum(sizes), device=mask_BP.device)
    return Anchors(root_BA, sizes, scale_BR, is_complete=True, has_all_pairs=True)


def every_root(mask_BP: Tensor, steps: int) -> Anchors:
    """Returns anchors at all pairs from which a chain of at most K - 1 drafted tokens reaches a supervised pair.

    An unrolled pass costs in proportion to them. Worked example, two steps:

        supervised [. . 1 1 .] [1 . . . .]    roots [1 2 3] [0 . .], filled up with other pairs: [1 2 3] [0 1 2]

    Where `every_pair` costs less, since causal attention needs no mask, it is that. The number of roots is read from the
    device, and at least 1: attention kernels need a query.
    """
    steps = min(steps, mask_BP.shape[1])
    is_root_BP = is_root_of(mask_BP, steps)
    num_roots = max(1, int(is_root_BP.sum(1).max()))
    if num_roots > MAX_ROOTS * mask_BP.shape[1]:
        return every_pair(mask_BP, steps)
    root_BA = (~is_root_BP).to(torch.uint8).argsort(stable=True)[:, :num_roots].sort(1).values
    scale_BR = is_root_BP.gather(1, root_BA).to(torch.get_default_dtype()).repeat(1, steps)
    return Anchors(root_BA, (num_roots,) * steps, scale_BR, is_complete=True)


def draw_anchors(is_root_BP: Tensor, num_anchors: int | None, keep: Sequence[float]) -> Anchors:
    """Draws roots of every sequence among `is_root_BP`.

    Args:
        num_anchors: most roots per sequence; None for all. Fewer are drawn if no sequence has as many: their number is read
            from the device, and it is at least 1, since attention kernels need a query.
        keep: share of the chains that are computed at each step, 1 at first and not increasing.
    """
    roots_B = is_root_BP.sum(1)
    most = max(1, int(roots_B.max()))
    num_drawn = most if num_anchors is None else min(num_anchors, most)
    order_BP = torch.rand(is_root_BP.shape, device=is_root_BP.device).masked_fill(~is_root_BP, 2.0)  # other pairs come last
    root_BA = order_BP.argsort(1)[:, :num_drawn]
    sizes = tuple(max(1, math.ceil(share * num_drawn)) for share in keep)
    drawn_B, place_A = roots_B.clamp(max=num_drawn), torch.arange(num_drawn, device=is_root_BP.device)
    scales = []
    for share, size in zip(keep, sizes, strict=True):
        kept_B = (share * drawn_B.double()).ceil()
        is_kept_BC = place_A[:size] < kept_B[:, None]
        scales.append(is_kept_BC * (roots_B / kept_B.clamp(min=1))[:, None])
    return Anchors(root_BA, sizes, torch.cat(scales, 1).to(torch.get_default_dtype()))


def gather_chains(
    hidden_BRD: Tensor, mask_BP: Tensor, anchors: Anchors, history_BP: Tensor | None = None
) -> tuple[Tensor, Rows]:
    """Gathers the rows [N, D] of drafts from anchors that predict a supervised token, in the order of their positions.

    Args:
        hidden_BRD: rows of all steps, those of step 0 first; a row of step i belongs to pair root + i.
        mask_BP: supervised pairs.
        history_BP: LongTensor, number of preceding pairs at which a chain to this pair may start; None = all of them.
    """
    num_pairs, step_R = mask_BP.shape[1], anchors.step_R
    chain_BA = torch.arange(anchors.root_BA.numel(), device=mask_BP.device).view_as(anchors.root_BA)
    pair_BR, chain_BR = anchors.pair_BR, anchors.per_row(chain_BA)
    place_BR = pair_BR.clamp(max=num_pairs - 1)
    is_row_BR = (pair_BR < num_pairs) & mask_BP.gather(1, place_BR) & (anchors.scale_BR > 0)
    if history_BP is not None:
        is_row_BR &= history_BP.gather(1, place_BR) >= step_R
    supervised_BP = mask_BP.flatten().cumsum(0).view_as(mask_BP) - 1
    position_BR = supervised_BP.gather(1, place_BR).masked_fill(~is_row_BR, mask_BP.numel())
    row_N = position_BR.flatten().argsort(stable=True)[: int(is_row_BR.sum())]
    position_N = position_BR.flatten()[row_N]
    among_S, place_N, counts_S = position_N.unique_consecutive(return_inverse=True, return_counts=True)
    rows = Rows(
        position=place_N,
        step=step_R.expand_as(position_BR).flatten()[row_N],
        counts=counts_S.tolist(),
        chain=chain_BR.flatten()[row_N],
        scale=anchors.scale_BR.flatten()[row_N],
        num_chains=anchors.root_BA.numel(),
        among=among_S,
        num_supervised=mask_BP.sum(),
        is_complete=anchors.is_complete,
    )
    return hidden_BRD.flatten(0, 1).index_select(0, row_N), rows


def within_turns(anchors: Anchors, mask_BP: Tensor) -> Anchors:
    """Returns the anchors with a factor of 0 for rows beyond the supervised run of their root (see `SlotStudent`)."""
    place_P = torch.arange(mask_BP.shape[1], device=mask_BP.device)
    gap_BP = torch.where(mask_BP, mask_BP.shape[1], place_P)  # places of unsupervised pairs
    end_BP = gap_BP.flip(1).cummin(1).values.flip(1)  # the first one from each pair on
    is_turn_BR = anchors.pair_BR < end_BP.gather(1, anchors.per_row(anchors.root_BA))
    return replace(anchors, scale_BR=anchors.scale_BR * is_turn_BR)

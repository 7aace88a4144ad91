"""Estimate of tokens per target pass during training, from the agreement of draft and target on the training batches.

Chains of `depth` drafted tokens are simulated over the supervised positions of a batch: a chain accepts tokens while draft and
target agree, adds the target's own token, and the next chain starts behind it. Worked example, depth 3, for an answer of seven
tokens of which the draft predicts all but the fourth:

    agree        1 1 1 0 1 1 1
    pass         1 . . . 2 . .     the first accepts three and adds the fourth, the second accepts three: 7 tokens, 2 passes

Differs from decoding: the text is that of the data, not of the target, and chains deeper than the unrolled steps of the
objective reuse the agreement of the last step. The page of a run compares the estimate with the measurement.

Drafts from a few anchors leave gaps, so that no answer can be walked. There a chain is expected to accept sum_k c_0 .. c_k
tokens, where c_k is the share of the chains that agree at step k among those that agreed at all steps before.

Shapes: B batch, P pairs, K unrolled steps, S supervised positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sage.trees.chain import Chain
from train.config.schema import DecodeConfig


def chain_depth(decode: DecodeConfig) -> int:
    """Returns the depth that policy `chain` is measured with."""
    return int(decode.options.get("chain", {}).get("depth", Chain.depth))


class ChainEstimate:
    """Collects agreements without device synchronization, and simulates chains of `depth` drafted tokens once per log step."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._batches: list[tuple[Tensor, Tensor]] = []
        self._counts: Tensor | None = None

    def add(self, agreements: Tensor, mask_BP: Tensor) -> None:
        """Adds one micro-batch.

        Args:
            agreements: BoolTensor [K, S], whether draft and target have the same most probable token; row s of step k is about
                the same token as row s of step 0, drafted k steps deep. With chains from anchors, the counts [2, K] of
                `train.distill.objective.chain_counts`.
            mask_BP: BoolTensor, the S supervised pairs.
        """
        if agreements.dtype is torch.bool:
            self._batches.append((agreements, mask_BP))
        else:
            self._counts = agreements if self._counts is None else self._counts + agreements

    def pop(self) -> Tensor:
        """Returns [2] float64, tokens and target passes of all chains simulated since the last call."""
        batches, self._batches = self._batches, []
        counts, self._counts = self._counts, None
        simulated = (simulate(agree_KS.cpu(), mask_BP.cpu(), self.depth) for agree_KS, mask_BP in batches)
        expected = torch.zeros(2, dtype=torch.float64) if counts is None else expect(counts.cpu(), self.depth)
        return sum(simulated, expected)


def simulate(agree_KS: Tensor, mask_BP: Tensor, depth: int) -> Tensor:
    """Returns [2] float64: supervised tokens, and target passes needed by chains of `depth` (see the module's example)."""
    rows = agree_KS.tolist()
    passes = 0
    for start, end in answers(mask_BP):
        position = start
        while position < end:
            accepted = 0
            while accepted < depth and position + accepted < end and rows[min(accepted, len(rows) - 1)][position + accepted]:
                accepted += 1
            position += accepted + 1
            passes += 1
    return torch.tensor([agree_KS.shape[1], passes], dtype=torch.float64)


def expect(counts_2K: Tensor, depth: int) -> Tensor:
    """Returns [2] float64: expected tokens of chains of `depth` from anchors, and their number, the target passes."""
    reached_K, agreed_K = counts_2K
    share_K = agreed_K / reached_K.clamp(min=1)
    deeper = share_K[-1:].expand(max(0, depth - len(share_K)))
    passes = reached_K[0].clamp(min=1)  # there may be none: a chain that starts before the answer has no first token
    return torch.stack((passes * (1 + torch.cat((share_K[:depth], deeper)).cumprod(0).sum()), passes))


def answers(mask_BP: Tensor) -> list[tuple[int, int]]:
    """Returns ranges [start, end) of the supervised positions that are contiguous in one sequence."""
    batch_S, pair_S = mask_BP.nonzero(as_tuple=True)
    if not len(pair_S):
        return []
    is_first_S = torch.ones_like(pair_S, dtype=torch.bool)
    is_first_S[1:] = (batch_S[1:] != batch_S[:-1]) | (pair_S[1:] != pair_S[:-1] + 1)
    starts = is_first_S.nonzero()[:, 0].tolist()
    return list(zip(starts, [*starts[1:], len(pair_S)], strict=True))

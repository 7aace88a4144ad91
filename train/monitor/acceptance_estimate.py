"""A cheap estimate of tokens per target pass, from what a training step knows anyway: where draft and target agree.

A chain of `depth` drafted tokens is simulated over the supervised positions of a batch: it starts at the first, keeps tokens
while the two agree, takes the target's own token where they do not, and starts again behind it. Worked example, depth 3, over
an answer of seven tokens of which the fourth is missed:

    agree        1 1 1 0 1 1 1
    pass         1 . . . 2 . .     the first keeps three and adds the fourth, the second keeps three: 7 tokens, 2 passes

Differs from decoding: the text is the data's, not the target's own, and an unrolled depth the objective did not train is
taken to agree as the deepest one it did. The decoder stays the judge; the run report shows both.

Shapes: B batch, P pairs, K unrolled steps, S supervised positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sage.trees.chain import Chain
from train.config.schema import DecodeConfig


def chain_depth(decode: DecodeConfig) -> int:
    """How deep the chains are that the decoder measures as policy `chain`."""
    return int(decode.options.get("chain", {}).get("depth", Chain.depth))


class ChainEstimate:
    """Collects agreements, without waiting for the device, until the next log step simulates.

    Args:
        depth: drafted tokens per pass.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._seen: list[tuple[Tensor, Tensor]] = []

    def add(self, agree_KS: Tensor, mask_BP: Tensor) -> None:
        """Takes one micro-batch.

        Args:
            agree_KS: BoolTensor, whether draft and target pick the same token; row s of step k is about the same token as row
                s of step 0, drafted k steps deep.
            mask_BP: BoolTensor, the S supervised pairs.
        """
        self._seen.append((agree_KS, mask_BP))

    def take(self) -> Tensor:
        """[2] float64: tokens and target passes of all simulated chains since the last call."""
        total = torch.zeros(2, dtype=torch.float64)
        for agree_KS, mask_BP in self._seen:
            total += simulate(agree_KS.cpu(), mask_BP.cpu(), self.depth)
        self._seen.clear()
        return total


def simulate(agree_KS: Tensor, mask_BP: Tensor, depth: int) -> Tensor:
    """[2] float64: supervised tokens, and the passes that chains of `depth` need for them; see the module's example."""
    rows = agree_KS.tolist()
    passes = 0
    for first, behind in answers(mask_BP):
        at = first
        while at < behind:
            kept = 0
            while kept < depth and at + kept < behind and rows[min(kept, len(rows) - 1)][at + kept]:
                kept += 1
            at += kept + 1
            passes += 1
    return torch.tensor([agree_KS.shape[1], passes], dtype=torch.float64)


def answers(mask_BP: Tensor) -> list[tuple[int, int]]:
    """Stretches [first, behind) of the supervised positions that lie next to each other in one sequence."""
    batch_S, pair_S = mask_BP.nonzero(as_tuple=True)
    if not len(pair_S):
        return []
    is_new_S = torch.ones_like(pair_S, dtype=torch.bool)
    is_new_S[1:] = (batch_S[1:] != batch_S[:-1]) | (pair_S[1:] != pair_S[:-1] + 1)
    starts = is_new_S.nonzero()[:, 0].tolist()
    return list(zip(starts, [*starts[1:], len(pair_S)], strict=True))

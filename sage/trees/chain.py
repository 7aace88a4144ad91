"""One drafted token per level. Ref: SAGE, arXiv 2602.00523, baseline SD-Chain (depth 5)."""

from __future__ import annotations

import torch

from sage.trees.base import Policy
from sage.trees.tree import Frontier, Growth


class Chain(Policy):
    """The draft's best token, `depth` times.

    Args:
        depth: drafted tokens per round.
    """

    name = "chain"
    candidates = 1

    def __init__(self, depth: int = 5) -> None:
        if depth < 1:
            raise ValueError(f"policy.chain.depth: {depth} is below 1; use the policy autoregressive to draft nothing")
        self.depth = depth
        self.max_nodes = depth + 1
        self._zero = torch.zeros(1, dtype=torch.long)

    def grow(self, frontier: Frontier) -> Growth:
        if self._zero.device != frontier.probs.device:
            self._zero = self._zero.to(frontier.probs.device)
        return Growth(self._zero, self._zero, self._zero if frontier.level < self.depth else self._zero[:0])

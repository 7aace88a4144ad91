"""One drafted token per level. Ref: SAGE, arXiv 2602.00523, baseline SD-Chain (depth 5)."""

from __future__ import annotations

from sage.trees.base import Policy
from sage.trees.options import check_count
from sage.trees.tree import Frontier, HostGrowth

_FIRST, _LAST = HostGrowth([0], [0]), HostGrowth([0], [])


class Chain(Policy):
    """The draft's best token, `depth` times.

    Args:
        depth: drafted tokens per round.

    Raises:
        ValueError: `depth` is no whole number, or below 1.
    """

    name = "chain"
    on_host = True
    candidates = 1

    def __init__(self, depth: int = 5) -> None:
        check_count("policy.chain.depth", depth, 1, "; the policy autoregressive drafts nothing")
        self.depth = depth
        self.max_nodes = depth + 1

    def grow(self, frontier: Frontier) -> HostGrowth:
        return _FIRST if frontier.level < self.depth else _LAST

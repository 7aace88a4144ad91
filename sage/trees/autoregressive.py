"""Decoding without speculation."""

from __future__ import annotations

from sage.planning.base import Policy
from sage.planning.tree import Frontier


class Autoregressive(Policy):
    """No draft, one token per target pass; the baseline of every comparison."""

    name = "autoregressive"
    num_candidates = 0
    tree_capacity = 1

    def next_level(self, frontier: Frontier) -> None:
        return None

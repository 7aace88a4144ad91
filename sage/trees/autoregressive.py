"""No speculation: the root alone, one token per target pass."""

from __future__ import annotations

from sage.trees.base import Policy
from sage.trees.tree import Frontier, Growth


class Autoregressive(Policy):
    """Never drafts; the baseline of every comparison, through the same loop."""

    name = "autoregressive"
    on_host = True
    candidates = 0
    max_nodes = 1

    def grow(self, frontier: Frontier) -> Growth | None:
        return None

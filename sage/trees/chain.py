"""Chains of drafted tokens. Ref: SAGE, arXiv 2602.00523, baseline SD-Chain (depth 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sage.io.ranges import Range
from sage.planning.base import Policy
from sage.planning.tree import Frontier, NextLevel

_INNER: NextLevel = NextLevel([0], [0])
_LAST: NextLevel = NextLevel([0], [])


@dataclass(eq=False, kw_only=True)
class Chain(Policy):
    """The draft's most probable token at every level.

    Args:
        depth: drafted tokens per round.
    """

    name = "chain"
    num_candidates = 1

    depth: Annotated[int, Range(ge=1, remedy="the policy autoregressive drafts nothing")] = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tree_capacity = self.depth + 1

    def next_level(self, frontier: Frontier) -> NextLevel:
        return _INNER if frontier.level < self.depth else _LAST

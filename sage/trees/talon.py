"""TALON's trees: the width of a level follows the draft's confidence, within a node budget. Ref: TALON, arXiv 2601.07353."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sage.io.ranges import PositiveInt, Range
from sage.planning.base import Policy, best_children
from sage.planning.tree import Frontier, NextLevel


@dataclass(eq=False, kw_only=True)
class Talon(Policy):
    """Levels keep nodes with at least `ratio` of the best path probability, until the budget is used (arXiv 2601.07353).

    Robust initialization: level 1 takes the root's top-K. Confidence gate: of the candidates of later levels (the top-K
    children of every node kept before), those stay whose path probability is at least `ratio` times the level's largest. The
    tree grows up to `total` nodes; a level that does not fit keeps its most probable nodes.

    Ref: TALON, arXiv 2601.07353, hybrid expansion. Differs by: `total` includes the root, as for `eagle2`; `max_depth` can end
    the drafting earlier (the paper ends at the budget only, up to `total - 1` draft passes for a chain).

    Args:
        total: nodes per round, the root included.
        top_k: K, children of a node at most.
        ratio: mu, the share of the level's largest path probability that a node needs.
        max_depth: maximum number of levels; null: until the budget is used.
    """

    name = "talon"

    total: Annotated[int, Range(ge=2, remedy="the policy autoregressive drafts nothing")] = 60
    top_k: PositiveInt = 10
    ratio: Annotated[float, Range(gt=0, lt=1)] = 0.03
    max_depth: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_candidates = self.top_k
        self.tree_capacity = self.total

    def begin(self) -> None:
        self._num_left = self.total - 1  # nodes that may still be added in this round
        self._paths = [1.0]  # path probabilities of the frontier

    def next_level(self, frontier: Frontier) -> NextLevel:
        picks, paths = best_children(frontier.rows, self._paths, self._num_left)
        if frontier.level > 1:
            gate = self.ratio * max(paths)
            passed = [i for i, path in enumerate(paths) if path >= gate]
            picks, paths = [picks[i] for i in passed], [paths[i] for i in passed]
        self._paths = paths
        self._num_left -= len(picks)
        is_last = self._num_left == 0 or frontier.level == self.max_depth
        return NextLevel(picks, [] if is_last else picks)

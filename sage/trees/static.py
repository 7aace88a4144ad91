"""The static 25-node tree. Ref: SAGE, arXiv 2602.00523 (SD-Tree; also SpecVLM's tree and SAGE's first tree)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sage.io.ranges import NonNegativeInt
from sage.planning.base import OptionError, Policy
from sage.planning.tree import Frontier, NextLevel

Ranks = tuple[int, ...]

# Child ranks along each path; 4 / 8 / 8 / 3 / 2 nodes per depth.
STATIC_TREE: tuple[Ranks, ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)


@dataclass(eq=False, kw_only=True)
class Static(Policy):
    """The same tree in every round; by default SAGE's SD-Tree of 25 nodes (arXiv 2602.00523).

    Args:
        paths: the child ranks along the path to each node; every prefix of a path must be a path.
    """

    name = "static"

    paths: Sequence[Sequence[NonNegativeInt]] = STATIC_TREE

    def __post_init__(self) -> None:
        super().__post_init__()
        nodes = sorted({tuple(path) for path in self.paths}, key=lambda path: (len(path), path))
        if not nodes or not nodes[0]:
            problem = f"{self.paths!r} is not allowed; give non-empty lists of ranks, for example [[0], [1], [0, 0]]"
            raise OptionError(self.name, "paths", problem)
        orphans = [path for path in nodes if len(path) > 1 and path[:-1] not in nodes]
        if orphans:
            raise OptionError(self.name, "paths", f"{orphans}: every prefix of a path must be a path; add {orphans[0][:-1]}")
        self.num_candidates = 1 + max(rank for path in nodes for rank in path)
        self.tree_capacity = len(nodes) + 1
        self._nodes = nodes

    def next_level(self, frontier: Frontier) -> NextLevel:
        num_candidates, children = len(frontier.rows[0]), [path for path in self._nodes if len(path) == frontier.level]
        parents = sorted({path[:-1] for path in children})  # the rows of the frontier
        expanded = {path[:-1] for path in self._nodes if len(path) == frontier.level + 1}
        picks = [parents.index(path[:-1]) * num_candidates + path[-1] for path in children]
        return NextLevel(picks, [pick for pick, path in zip(picks, children, strict=True) if path in expanded])

"""The static 25-node tree. Ref: SAGE, arXiv 2602.00523 (SD-Tree; also SpecVLM's tree and SAGE's first tree)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sage.trees.base import Policy
from sage.trees.options import is_count
from sage.trees.tree import Frontier, HostGrowth

Path = tuple[int, ...]

# Child ranks along each path; 4 / 8 / 8 / 3 / 2 nodes per depth.
STATIC_TREE: tuple[Path, ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)


class Static(Policy):
    """The same tree every round.

    Args:
        paths: one tuple of child ranks per node; every prefix of a path must be a path.

    Raises:
        ValueError: no paths, one that is empty or no list of ranks, or one without its prefix.
    """

    name = "static"
    on_host = True

    def __init__(self, paths: Sequence[Sequence[int]] = STATIC_TREE) -> None:
        _check_paths(paths)
        nodes = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        orphans = [path for path in nodes if len(path) > 1 and path[:-1] not in nodes]
        if orphans:
            raise ValueError(f"policy.static.paths: {orphans}; every prefix of a path must be a path itself")
        self.candidates = 1 + max(rank for path in nodes for rank in path)
        self.max_nodes = len(nodes) + 1
        self._levels = [_level(nodes, depth) for depth in range(1, len(nodes[-1]) + 1)]
        self._growth: dict[int, list[HostGrowth]] = {}  # the levels by number of candidates, made once

    def grow(self, frontier: Frontier) -> HostGrowth:
        num_candidates = frontier.probs.shape[1]
        if num_candidates not in self._growth:
            self._growth[num_candidates] = [_growth(*level, num_candidates) for level in self._levels]
        return self._growth[num_candidates][frontier.level - 1]


def _check_paths(paths: Any) -> None:
    """Refuses anything but a list of lists of child ranks, none of them empty."""
    if not _is_list(paths) or not paths:
        raise ValueError(f"policy.static.paths: {paths!r} is not allowed; give a list of paths, for example [[0], [1], [0, 0]]")
    for path in paths:
        if not _is_list(path) or not path or not all(is_count(rank, 0) for rank in path):
            raise ValueError(
                f"policy.static.paths: {path!r} is no path; give the ranks along it, whole numbers of at least 0, "
                f"for example [0, 1]"
            )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _growth(rows: list[int], ranks: list[int], expand: list[int], num_candidates: int) -> HostGrowth:
    picks = [row * num_candidates + rank for row, rank in zip(rows, ranks, strict=True)]
    return HostGrowth(picks, [picks[index] for index in expand])


def _level(nodes: list[Path], depth: int) -> tuple[list[int], list[int], list[int]]:
    """Rows, ranks and expanded indices of one level; a row counts the parents that have children, in order."""
    children = [path for path in nodes if len(path) == depth]
    inner = sorted({path[:-1] for path in nodes if len(path) == depth + 1})
    parents = sorted({path[:-1] for path in children})
    rows = [parents.index(path[:-1]) for path in children]
    return rows, [path[-1] for path in children], [children.index(path) for path in inner]

"""Ranking by path probability, shared by policies: the best children of a frontier, the best nodes of a tree.

The order is the probability of the path, descending; ties go to the node that comes first in the tree. A parent always ranks
before its children: it comes first, and its probability is at least theirs (a factor never exceeds 1, and rounding is monotone,
so fl(x * p) <= x). Every prefix of the order is therefore a tree, with or without ties.

Shapes: F frontier nodes, K candidates per node, M selected.
"""

from __future__ import annotations

from collections.abc import Sequence


def best(probs: Sequence[float], count: int) -> list[int]:
    """Returns the indices of the `count` largest numbers, increasing."""
    indices = range(len(probs))
    if count >= len(probs):
        return list(indices)
    return sorted(sorted(indices, key=probs.__getitem__, reverse=True)[:count])  # stable: ties keep their order


def best_children(
    rows: Sequence[Sequence[float]], paths: Sequence[float], count: int, above: float = -1.0
) -> tuple[list[int], list[float]]:
    """Returns the `count` most probable paths among the children of the frontier nodes.

    Args:
        rows: [F, K], as in `Frontier`.
        paths: [F], path probabilities of the frontier nodes.
        above: paths that are not more probable are left out.

    Returns:
        `NextLevel.picks` [M], increasing, and their path probabilities [M]; M <= min(count, F * K).
    """
    picks: list[int] = []
    found: list[float] = []
    first = 0
    for path, probs in zip(paths, rows, strict=True):
        for pick, prob in enumerate(probs, first):
            child = path * prob
            if child <= above:  # as are all further ones
                break
            picks.append(pick)
            found.append(child)
        first += len(probs)
    if len(found) > count:
        kept = best(found, count)
        picks, found = [picks[i] for i in kept], [found[i] for i in kept]
    return picks, found

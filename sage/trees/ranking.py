"""Ranking by path probability, shared by policies: the best children of a frontier, the best nodes of a tree.

The order is the probability of the path, descending; ties go to the node that comes first in the tree. A parent always ranks
before its children: it comes first, and its probability is at least theirs (a factor never exceeds 1, and rounding is monotone,
so fl(x * p) <= x). Every prefix of the order is therefore a tree, with or without ties. No function synchronizes with the
device.

Shapes: N tree nodes, F frontier nodes, K children per node, M selected.
"""

from __future__ import annotations

from torch import Tensor

from sage.trees.tree import DraftedTree, Frontier


def best_children(frontier: Frontier, branching: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the `count` most probable paths among the `branching` best children of every frontier node.

    Returns:
        `NextLevel.picks`, LongTensor [M], increasing; `order`, LongTensor [M], indices into them, most probable first; the
        path probabilities [M] in that order. M = min(count, F * K).
    """
    path_FK = frontier.path_probs[:, None] * frontier.probs[:, :branching]
    best = path_FK.flatten().sort(descending=True, stable=True)
    picks, place = best.indices[:count].sort()
    num_candidates, width = frontier.probs.shape[1], path_FK.shape[1]
    if width < num_candidates:
        picks = picks // width * num_candidates + picks % width
    return picks, place.argsort(), best.values[:count]


def best_nodes(drafted: DraftedTree, count: int) -> Tensor:
    """Returns the indices [M], increasing, of the `count` most probable nodes, the root included."""
    order = drafted.path_probs.sort(descending=True, stable=True).indices
    return order[:count].sort().values

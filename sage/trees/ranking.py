"""What policies that rank paths share: the best children of a frontier, the best nodes of a tree.

One order everywhere: the probability of the path, largest first; among equals what stands first in the tree. A parent always
comes before its children in it: it stands first, and its probability is at least theirs (a factor never exceeds 1, and rounding
is monotone, so fl(x * p) <= x). Hence every leading part of the order is a tree, with or without ties. Nothing here waits for
the device.

Shapes: N tree nodes, F frontier nodes, K children per node, M chosen.
"""

from __future__ import annotations

from torch import Tensor

from sage.trees.tree import Drafted, Frontier


def best_children(frontier: Frontier, branching: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` most probable paths among the `branching` best children of every frontier node.

    Returns:
        picks, LongTensor [M], as in `Growth`, in the order in which the tree will hold them; `order`, LongTensor [M], indices
        into them, most probable first; [M], the paths' probabilities in that order. M = min(count, F * K).
    """
    path_FK = frontier.path_probs[:, None] * frontier.probs[:, :branching]
    best = path_FK.flatten().sort(descending=True, stable=True)
    picks, place = best.indices[:count].sort()
    num_candidates, width = frontier.probs.shape[1], path_FK.shape[1]
    if width < num_candidates:
        picks = picks // width * num_candidates + picks % width
    return picks, place.argsort(), best.values[:count]


def best_nodes(drafted: Drafted, count: int) -> Tensor:
    """Indices [M], increasing, of the `count` most probable nodes; the root is the first of them."""
    order = drafted.path_probs.sort(descending=True, stable=True).indices
    return order[:count].sort().values

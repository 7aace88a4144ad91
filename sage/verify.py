"""Lossless acceptance: the target alone decides every token; the tree only decides which of its decisions come for free.

At each node the target chooses the next token x (its argmax, or a seeded draw). If x is a child the path descends, else x is
the bonus token and the round ends. The law of the output is the target's for any tree that does not depend on the draws.

Ref: sampling a tree from the target only, SpecInfer, arXiv 2305.09781, section 4.3 (naive sampling, exact for any tree).

Shapes: N tree nodes, P accepted path.
"""

from __future__ import annotations

from collections.abc import Sequence

from sage.trees.tree import Tree


def accept(tree: Tree, choices: Sequence[int]) -> tuple[list[int], list[int]]:
    """Walks down from the root along the target's choices.

    Args:
        tree: N nodes; no two children of a node share a token.
        choices: [N], the target's next token after each node.

    Returns:
        the accepted nodes [P], the root first, and the emitted tokens [P]: theirs without the root's, then the bonus token.
    """
    tokens, parents, _ = tree.columns
    last, choice = 0, choices[0]
    path, emitted = [last], [choice]
    for node, parent in enumerate(parents):  # children stand behind their parents, so one look at every node is enough
        if parent == last and tokens[node] == choice:
            last, choice = node, choices[node]
            path.append(last)
            emitted.append(choice)
    return path, emitted

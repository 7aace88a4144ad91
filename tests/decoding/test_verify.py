"""Acceptance by hand; its output distribution is enumerated in test_tree_properties.py and test_losslessness.py."""

from __future__ import annotations

from support.slow_trees import tree_of

from sage.decoding.verify import accept


def test_accept_by_hand() -> None:
    """Root chooses 3 (a child), that chooses 3 (a child), that chooses 0 (no child): two accepted, 0 is the bonus."""
    tree = tree_of([(1,), (3,), (3, 3), (3, 1)])
    assert accept(tree, [3, 0, 3, 0, 2]) == ([0, 2, 3], [3, 3, 0])


def test_nothing_accepted_gives_the_bonus_token() -> None:
    assert accept(tree_of([(1,)]), [2, 0]) == ([0], [2])

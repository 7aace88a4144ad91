"""Acceptance: examples by hand, and the output distribution, enumerated in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from support.slow_trees import tree_of

from sage.decoding.verify import accept
from sage.planning.tree import Tree

VOCABULARY, DEPTH = 4, 3


def random_target(seed: int = 0) -> dict[tuple[int, ...], torch.Tensor]:
    """A random target: p(next | path) in float64 for every path up to DEPTH."""
    generator = torch.Generator().manual_seed(seed)
    paths = [path for n in range(DEPTH + 1) for path in itertools.product(range(VOCABULARY), repeat=n)]
    return {path: torch.rand(VOCABULARY, generator=generator, dtype=torch.float64).softmax(0) for path in paths}


def first_tokens_distribution(
    tree: Tree, target: dict[tuple[int, ...], torch.Tensor], pick: object
) -> dict[tuple[int, ...], float]:
    """Exact distribution of one round's tokens if every node draws independently from the target's p."""
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(tree.parents.tolist()[1:], tree.tokens.tolist()[1:], strict=True):
        paths.append((*paths[parent], token))
    total: dict[tuple[int, ...], float] = {}
    for draws in itertools.product(range(VOCABULARY), repeat=len(tree)):
        weight = 1.0
        for path, draw in zip(paths, draws, strict=True):
            weight *= float(target[path][draw])
        _, emitted = pick(tree, draws)  # type: ignore[operator]
        total[tuple(emitted)] = total.get(tuple(emitted), 0.0) + weight
    return total


TREES = [
    [],
    [(0,)],
    [(0,), (2,)],
    [(1,), (3,), (1, 0), (1, 2)],
    [(0,), (0, 1), (0, 1, 2)],
    [(3,), (3, 3), (0,), (0, 2), (3, 3, 1)],
]


def deviation(found: dict[tuple[int, ...], float], target: dict[tuple[int, ...], torch.Tensor]) -> float:
    """Largest difference between the probability of an emitted sequence and the target's."""
    worst = abs(sum(found.values()) - 1)
    for emitted, probability in found.items():
        expected = 1.0
        for i, token in enumerate(emitted):
            expected *= float(target[emitted[:i]][token])
        worst = max(worst, abs(probability - expected))
    return worst


@pytest.mark.parametrize("paths", TREES, ids=len)
def test_output_distribution_is_the_targets_for_any_tree(paths: list[tuple[int, ...]]) -> None:
    """The end of a round depends on the tokens only, so each emitted sequence must have the target's probability."""
    target = random_target()
    assert deviation(first_tokens_distribution(tree_of(paths), target, accept), target) < 1e-12


def test_negative_control_biased_rule() -> None:
    """A rule that descends into the only child whatever the draw is must fail the test above."""

    def eager(tree: Tree, choices: Sequence[int]) -> tuple[list[int], list[int]]:
        return [0, 1], [int(tree.tokens[1]), choices[1]]

    target = random_target()
    assert deviation(first_tokens_distribution(tree_of([(0,)]), target, eager), target) > 0.05


def test_accept_by_hand() -> None:
    """Root chooses 3 (a child), that chooses 3 (a child), that chooses 0 (no child): two accepted, 0 is the bonus."""
    tree = tree_of([(1,), (3,), (3, 3), (3, 1)])
    assert accept(tree, [3, 0, 3, 0, 2]) == ([0, 2, 3], [3, 3, 0])


def test_nothing_accepted_gives_the_bonus_token() -> None:
    assert accept(tree_of([(1,)]), [2, 0]) == ([0], [2])

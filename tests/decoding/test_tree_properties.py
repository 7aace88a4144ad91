"""Properties of random trees: acceptance against a walk, one text by seed, the distribution of a round."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy_helpers import SlowTree, paths_of, probability, target_probs

from sage.decoding.settings import Sampling
from sage.decoding.verify import TargetSampler, accept

Context = tuple[int, ...]
Rule = Callable[[SlowTree, Sequence[int]], tuple[list[int], list[int]]]


@st.composite
def random_trees(draw: st.DrawFn, vocabulary: int = 6, most_levels: int = 4, most_per_level: int = 4) -> SlowTree:
    """Generates trees level by level; siblings have different tokens."""
    tree = SlowTree.of_token(draw(st.integers(0, vocabulary - 1)))
    level = [0]
    for _ in range(draw(st.integers(0, most_levels))):
        place = st.tuples(st.sampled_from(level), st.integers(0, vocabulary - 1))
        places = draw(st.lists(place, min_size=1, max_size=most_per_level, unique=True))
        parents, tokens = torch.tensor(places).unbind(1)
        probs = torch.tensor([draw(st.sampled_from([0.0, 0.125, 0.5, 1.0])) for _ in places])
        level = tree.add_level(parents, tokens, probs).tolist()
    return tree


def walk(tree: SlowTree, node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(tree.parents[node])
    return path[::-1]


def token_paths(tree: SlowTree) -> list[Context]:
    return [(int(tree.tokens[0]), *path) for path in paths_of(tree)]


few = settings(max_examples=40, deadline=None)


@few
@given(random_trees(), st.data())
def test_acceptance_is_a_walk_and_ignores_other_nodes(tree: SlowTree, data: st.DataObject) -> None:
    """Against a walk over token paths; changing the draws off the path changes nothing."""
    draw = st.lists(st.integers(0, 5), min_size=len(tree), max_size=len(tree))
    chosen = data.draw(draw)
    known = {path: node for node, path in enumerate(token_paths(tree))}
    at, emitted = token_paths(tree)[0], []
    while at in known:
        emitted.append(chosen[known[at]])
        at = (*at, emitted[-1])
    path, found = accept(tree, chosen)
    assert found == emitted
    assert path == [known[at[: n + 1]] for n in range(len(path))]
    other = [
        choice if node in path else noise for node, (choice, noise) in enumerate(zip(chosen, data.draw(draw), strict=True))
    ]
    assert accept(tree, other) == (path, found)


@few
@given(random_trees(), st.integers(0, 2**31), st.integers(1, 5))
def test_one_seed_gives_the_same_tokens_in_any_tree(tree: SlowTree, seed: int, num_prompt: int) -> None:
    """A node's choice is a function of its logits, prefix, position and seed: in the tree, or along its path alone."""
    logits = torch.randn(len(tree), 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    sampler = TargetSampler(Sampling(temperature=1.0, seed=seed, repetition_penalty=1.5), torch.arange(num_prompt))
    sampler.extend([0, int(tree.tokens[0])])
    together = sampler(logits, tree)
    for leaf in leaves(tree):
        path = torch.tensor(walk(tree, leaf))
        assert torch.equal(sampler(logits[path], tree.subtree(path)), together[path])


def distance_of_round(tree: SlowTree, rule: Rule = accept) -> float:
    """The largest error in the probability of what a round emits, over all draws; later tokens are drawn anew."""
    contexts: list[Context] = token_paths(tree)
    found: dict[Context, float] = {}
    weights = [target_probs(context).tolist() for context in contexts]
    for draws in itertools.product(range(4), repeat=len(tree)):
        key = tuple(rule(tree, draws)[1])
        found[key] = found.get(key, 0.0) + math.prod(weights[node][draw] for node, draw in enumerate(draws))
    assert abs(sum(found.values()) - 1) < 1e-12
    root = contexts[0]
    return max(abs(weight - probability((*root, *emitted)) / probability(root)) for emitted, weight in found.items())


@few
@given(random_trees(vocabulary=4, most_levels=3, most_per_level=2))
def test_any_tree_keeps_the_targets_distribution(tree: SlowTree) -> None:
    assert distance_of_round(tree) < 1e-12


def ignoring_the_draw(tree: SlowTree, draws: Sequence[int]) -> tuple[list[int], list[int]]:
    return [0, 1], [int(tree.tokens[1]), draws[1]]


def seeing_the_draws(tree: SlowTree, draws: Sequence[int]) -> tuple[list[int], list[int]]:
    """As a policy that keeps its only child exactly if the draw below it is token 1, which makes token 1 too probable."""
    keep = [0, 1] if draws[1] == 1 else [0]
    return accept(tree.subtree(torch.tensor(keep)), draws[: len(keep)])


@pytest.mark.parametrize("rule", [ignoring_the_draw, seeing_the_draws])
def test_negative_controls_of_the_distribution(rule: Rule) -> None:
    tree = SlowTree.of_token(0)
    tree.add_level(torch.tensor([0]), target_probs((0,)).argmax()[None], torch.tensor([0.5]))
    assert distance_of_round(tree) < 1e-12 and distance_of_round(tree, rule) > 0.02


def leaves(tree: SlowTree) -> Iterator[int]:
    inner = set(tree.parents.tolist())
    return (node for node in range(len(tree)) if node not in inner)

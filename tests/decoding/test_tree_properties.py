"""Properties of random trees: invariants, acceptance against a walk, the tree pass against sequential passes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import MAKERS, followed_by, in_float64, make_inputs
from support.pass_helpers import tree_pass
from support.toy_helpers import SlowTree, probability, target_probs

import sage
from sage.decoding.settings import Sampling
from sage.decoding.verify import TargetSampler, accept
from sage.targets import Prompt

Context = tuple[int, ...]


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
    return [tuple(tree.tokens[walk(tree, node)].tolist()) for node in range(len(tree))]


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


@few
@given(random_trees(vocabulary=4, most_levels=3, most_per_level=2))
def test_any_tree_keeps_the_targets_distribution(tree: SlowTree) -> None:
    """All draws of one round below any tree, then fresh draws: the target's own distribution to 1e-12."""
    contexts: list[Context] = token_paths(tree)
    found: dict[Context, float] = {}
    weights = [target_probs(context).tolist() for context in contexts]
    for draws in itertools.product(range(4), repeat=len(tree)):
        _, emitted = accept(tree, draws)
        key = tuple(emitted)
        found[key] = found.get(key, 0.0) + math.prod(weights[node][draw] for node, draw in enumerate(draws))
    assert abs(sum(found.values()) - 1) < 1e-12
    root = contexts[0]
    for emitted, weight in found.items():
        assert abs(weight - probability((*root, *emitted)) / probability(root)) < 1e-12


@functools.cache
def prompted(family: str, kv_heads: int, tied: bool) -> tuple[sage.Target, dict[str, torch.Tensor], Prompt]:
    target = MAKERS[family](kv_heads=kv_heads, tied=tied)
    inputs = in_float64(target, make_inputs(target))
    return target, inputs, target.embed(inputs)


def leaves(tree: SlowTree) -> Iterator[int]:
    inner = set(tree.parents.tolist())
    return (node for node in range(len(tree)) if node not in inner)


@pytest.mark.parametrize(("family", "kv_heads", "tied"), [(f, *heads) for f in MAKERS for heads in ((2, False), (4, True))])
@settings(max_examples=8, deadline=None)
@given(tree=random_trees(vocabulary=50, most_levels=3, most_per_level=3))
def test_a_tree_pass_equals_sequential_passes_of_its_paths(family: str, kv_heads: int, tied: bool, tree: SlowTree) -> None:
    """All nodes at once with the tree mask against one causal pass per leaf, float64, prompt with an image."""
    target, inputs, prompt = prompted(family, kv_heads, tied)
    cache = target.new_cache(64)
    target.prefill(prompt, cache)
    found = tree_pass(target, tree.tokens, prompt.next_position + tree.depths, tree.ancestors, cache).last[0]
    for leaf in leaves(tree):
        path = walk(tree, leaf)
        again = followed_by(target, inputs, tree.tokens[path])
        straight = target.features(target.embed(again)).last[0, -len(path) :]
        torch.testing.assert_close(found[path], straight, atol=1e-11, rtol=0)

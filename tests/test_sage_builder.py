"""The tree builder against trees grown and cut one operation at a time, for every policy, on the host and on the device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_trees import SlowTree, add_growth, as_keep, numbers

import sage
from sage.trees import Frontier, Growth, HostGrowth, Policy, Tree, TreeBuilder
from sage.trees.builder import DROPPED

K = 12
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("chain", {"depth": 4}),
    ("static", {}),
    ("eagle2", {"total": 9, "depth": 4, "top_k": 3}),
    ("spec_llava", {"budget": 8, "branch": 3, "steps": 3, "min_confidence": 0.02}),
    ("talon", {"total": 14, "top_k": 3, "ratio": 0.2}),
    ("ddd", {"total": 9, "depth": 5, "top_k": 3, "threshold": 0.6, "check_every": 1}),
    ("sage", {"alpha_from": "current", "max_nodes": 30}),
    ("cost_aware", {"calibrate": False}),
]
policies = st.sampled_from(POLICIES)
few = settings(max_examples=60, deadline=None)


def make(name: str, options: dict[str, Any]) -> Policy:
    policy = sage.policy(name, **options)
    if policy.learns:
        verify, draft = sage.costs.Curve([1, 64], [1.0, 1.6]), sage.costs.Curve([1, 16], [0.05, 0.08])
        policy.costs = sage.costs.Costs(verify, draft, context=0)
    policy.reset()
    policy.begin()
    return policy


def says(seed: int, node: int) -> tuple[list[float], list[int]]:
    """What a made-up draft says below a node: probabilities, descending, and tokens, all different."""
    chance = random.Random(f"{seed} {node}")
    logits = torch.tensor([chance.gauss(0, 2) for _ in range(K)])
    return logits.softmax(0).sort(descending=True).values.tolist(), chance.sample(range(100), K)


def on_device(growth: Growth | HostGrowth | None) -> Growth | HostGrowth | None:
    return growth and Growth(*(torch.tensor(chosen, dtype=torch.long) for chosen in numbers(growth)))


def grow(policy: Policy, seed: int, levels: int, is_on_device: bool) -> tuple[TreeBuilder, SlowTree]:
    """One round, built both ways; `is_on_device`: as if the policy had chosen there."""
    root = torch.tensor([7])
    builder, slow, frontier = TreeBuilder(root), SlowTree.of_root(root), torch.tensor([0])
    for level in range(1, levels + 1):
        said = [says(seed, node) for node in frontier.tolist()]
        count = min(policy.candidates, K)
        probs, tokens = (torch.tensor([row[:count] for row in column]) for column in zip(*said, strict=True))
        seen = builder.ask(probs, tokens)
        assert seen.level == level and torch.equal(seen.path_probs, slow.path_probs[frontier])
        slow.note_candidates(frontier, probs, tokens)
        growth = policy.grow(Frontier(level, probs, slow.path_probs[frontier]))
        growth = on_device(growth) if is_on_device else growth
        if growth is None:
            break
        builder.add(growth)
        parents, frontier = frontier, add_growth(slow, frontier, growth, probs, tokens)
        if len(frontier) == 0 or level == levels:
            break
        rows, asked = builder.advance(growth)
        assert torch.equal(asked, slow.tokens[frontier]) and torch.equal(parents[rows], slow.parents[frontier])
    return builder, slow


def check_same(fast: Tree, slow: SlowTree) -> None:
    for name in ("tokens", "parents", "depths"):
        assert torch.equal(getattr(fast, name), getattr(slow, name)), name
    assert fast.num_levels == slow.num_levels
    assert torch.equal(fast.drafted >= 0, slow.drafted >= 0)
    there = slow.drafted >= 0
    for name in ("candidates", "candidate_tokens"):
        assert torch.equal(getattr(fast, name)[fast.drafted[there]], getattr(slow, name)[slow.drafted[there]]), name


@few
@given(policies, st.integers(0, 999), st.integers(1, 6), st.booleans())
def test_a_built_tree_is_the_tree_grown_step_by_step(
    case: tuple[str, dict[str, Any]], seed: int, levels: int, is_on_device: bool
) -> None:
    policy = make(*case)
    builder, slow = grow(policy, seed, levels, is_on_device)
    assert len(builder) == len(slow)
    torch.testing.assert_close(builder.path_probs, slow.path_probs)
    check_same(builder.tree(), slow)
    keep = policy.select(builder)
    if keep is not None:
        check_same(builder.tree(keep), slow.subtree(as_keep(keep)))
    lean = builder.tree(keep, looks_back=False)
    assert len(lean.candidates) == 0 and torch.equal(lean.tokens, builder.tree(keep).tokens)


@few
@given(policies, st.integers(0, 999), st.booleans(), st.data())
def test_any_part_with_its_ancestors_can_be_kept_and_no_other(
    case: tuple[str, dict[str, Any]], seed: int, is_on_device: bool, data: st.DataObject
) -> None:
    builder, slow = grow(make(*case), seed, 5, is_on_device)
    keep = {0}
    for node in data.draw(st.sets(st.integers(0, len(slow) - 1))):
        while node > 0:
            keep.add(node)
            node = int(slow.parents[node])
    chosen = data.draw(st.sampled_from([sorted(keep), torch.tensor(sorted(keep))]))
    check_same(builder.tree(chosen), slow.subtree(as_keep(chosen)))
    inner = sorted(set(slow.parents[torch.tensor(sorted(keep))].tolist()) - {-1})
    if inner:
        without = sorted(keep - {data.draw(st.sampled_from(inner))})
        with pytest.raises(AssertionError, match=DROPPED):
            builder.tree(without)


def test_a_tree_nobody_asked_about_is_the_root() -> None:
    tree = TreeBuilder(torch.tensor([7])).tree()
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.drafted.tolist(), len(tree.candidates)) == ([7], [-1], [-1], 0)


def test_ends_are_the_candidates_that_end_the_answer() -> None:
    builder = TreeBuilder(torch.tensor([7]), eos=(4, 9))
    frontier = builder.ask(torch.tensor([[0.5, 0.3, 0.1]]), torch.tensor([[4, 2, 9]]))
    assert frontier.ends == {0, 2}
    assert TreeBuilder(torch.tensor([7])).ask(torch.ones(1, 1), torch.tensor([[4]])).ends == ()


def test_path_probabilities_are_computed_where_somebody_looks() -> None:
    builder = TreeBuilder(torch.tensor([7]))
    for _ in range(3):
        frontier = builder.ask(torch.tensor([[0.5]]), torch.tensor([[1]]))
        builder.add(HostGrowth([0], [0]))
        builder.advance(HostGrowth([0], [0]))
    assert "path_probs" not in vars(frontier)
    assert frontier.path_probs.tolist() == [0.25]

"""Tree builders against trees grown and pruned one operation at a time, for every policy, on the host and on the device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.slow_trees import SlowTree, add_next_level, as_keep, numbers
from torch import Tensor

import sage
from sage.host_tensors import CPU
from sage.trees.base import Policy
from sage.trees.level import DROPPED, DeviceBuilder, HostBuilder, TreeBuilder, new_builder
from sage.trees.tree import Frontier, NextLevel, Tree

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
    if policy.needs_costs:
        verify, draft = sage.costs.tables.Curve([1, 64], [1.0, 1.6]), sage.costs.tables.Curve([1, 16], [0.05, 0.08])
        policy.costs = sage.costs.tables.Costs(verify, draft, context=0)
    policy.reset()
    policy.begin()
    return policy


def candidates(seed: int, node: int) -> tuple[list[float], list[int]]:
    """Returns synthetic candidates below a node: probabilities, descending, and distinct tokens."""
    generator = random.Random(f"{seed} {node}")
    logits = torch.tensor([generator.gauss(0, 2) for _ in range(K)])
    return logits.softmax(0).sort(descending=True).values.tolist(), generator.sample(range(100), K)


def as_level(next_level: NextLevel[Any], is_on_device: bool) -> NextLevel[Any]:
    if is_on_device:
        return NextLevel(*(torch.tensor(chosen, dtype=torch.long) for chosen in numbers(next_level)))
    return NextLevel(*numbers(next_level))


def grow(policy: Policy, seed: int, levels: int, is_on_device: bool) -> tuple[TreeBuilder, SlowTree]:
    """Builds one round with a builder and with `SlowTree`; `is_on_device` selects the builder for any policy."""
    builder = DeviceBuilder(7, CPU) if is_on_device else HostBuilder(7, CPU)
    slow, frontier = SlowTree.of_token(7), torch.tensor([0])
    for level in range(1, levels + 1):
        topk = [candidates(seed, node) for node in frontier.tolist()]
        count = min(policy.num_candidates, K)
        probs, tokens = (torch.tensor([row[:count] for row in column]) for column in zip(*topk, strict=True))
        seen = builder.open_level(probs, tokens)
        assert seen.level == level and torch.equal(seen.probs, probs) and seen.rows == probs.tolist()
        if is_on_device:
            assert torch.equal(seen.path_probs, slow.path_probs[frontier])
        slow.note_candidates(frontier, probs, tokens)
        next_level = policy.next_level(Frontier(level, probs, slow.path_probs[frontier]))
        next_level = next_level and as_level(next_level, is_on_device)
        if next_level is None:
            break
        builder.add(next_level)
        parents, frontier = frontier, add_next_level(slow, frontier, next_level, probs, tokens)
        if len(frontier) == 0 or level == levels:
            break
        rows, expanded_tokens = builder.advance(next_level)
        assert torch.equal(torch.as_tensor(expanded_tokens), slow.tokens[frontier]) and torch.equal(
            parents[rows], slow.parents[frontier]
        )
    return builder, slow


def check_same(fast: Tree, slow: SlowTree, is_on_device: bool) -> None:
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(fast, name), getattr(slow, name)), name
    assert fast.columns == slow.columns and fast.depth == slow.depth <= fast.num_levels
    assert list(fast.draft_topk) == ([] if is_on_device and slow.num_levels else slow.draft_topk)


def as_chosen(keep: list[int], is_on_device: bool) -> Tensor | list[int]:
    return torch.tensor(keep) if is_on_device else keep


@few
@given(policies, st.integers(0, 999), st.integers(1, 6), st.booleans())
def test_a_built_tree_equals_the_tree_grown_step_by_step(
    case: tuple[str, dict[str, Any]], seed: int, levels: int, is_on_device: bool
) -> None:
    policy = make(*case)
    builder, slow = grow(policy, seed, levels, is_on_device)
    assert len(builder) == len(slow)
    torch.testing.assert_close(builder.path_probs, slow.path_probs)
    check_same(builder.tree(), slow, is_on_device)
    keep = policy.select(builder)
    if keep is not None:
        kept = as_keep(keep)
        kept = kept.sort().values if is_on_device else kept
        check_same(builder.tree(as_chosen(kept.tolist(), is_on_device)), slow.subtree(kept), is_on_device)


@few
@given(policies, st.integers(0, 999), st.booleans(), st.data())
def test_any_ancestor_closed_selection_is_kept_and_no_other(
    case: tuple[str, dict[str, Any]], seed: int, is_on_device: bool, data: st.DataObject
) -> None:
    builder, slow = grow(make(*case), seed, 5, is_on_device)
    keep = {0}
    for node in data.draw(st.sets(st.integers(0, len(slow) - 1))):
        while node > 0:
            keep.add(node)
            node = int(slow.parents[node])
    order = sorted(keep)
    if not is_on_device:  # any order with parents before children
        luck = data.draw(st.randoms(use_true_random=False))
        order, rest = [0], order[1:]
        while rest:
            order.append(luck.choice([node for node in rest if int(slow.parents[node]) in order]))
            rest.remove(order[-1])
    check_same(builder.tree(as_chosen(order, is_on_device)), slow.subtree(torch.tensor(order)), is_on_device)
    inner = sorted(set(slow.parents[torch.tensor(order)].tolist()) - {-1})
    if inner:
        dropped = data.draw(st.sampled_from(inner))
        with pytest.raises(AssertionError, match=DROPPED):
            builder.tree(as_chosen([node for node in order if node != dropped], is_on_device))


def test_a_tree_without_levels_is_the_root() -> None:
    for builder in (HostBuilder(7, CPU), DeviceBuilder(7, CPU)):
        tree = builder.tree()
        assert tree.columns == ([7], [-1], [0]) and list(tree.draft_topk) == [None] and tree.ancestors.tolist() == [[True]]
        assert builder.path_probs.tolist() == [1.0]


def test_ends_are_the_candidates_that_end_the_answer() -> None:
    builder = HostBuilder(7, CPU, eos=(4, 9))
    assert list(builder.open_level(torch.tensor([[0.5, 0.3, 0.1]]), torch.tensor([[4, 2, 9]])).ends) == [0, 2]
    builder.add(NextLevel([1, 2], [1, 2]))
    builder.advance(NextLevel([1, 2], [1, 2]))
    assert list(builder.open_level(torch.full((2, 3), 0.3), torch.tensor([[1, 2, 3], [1, 4, 3]])).ends) == [4]
    assert list(HostBuilder(7, CPU).open_level(torch.ones(1, 1), torch.tensor([[4]])).ends) == []


def test_path_probabilities_are_computed_lazily() -> None:
    builder, best = DeviceBuilder(7, CPU), NextLevel(torch.tensor([0]), torch.tensor([0]))
    for _ in range(3):
        frontier = builder.open_level(torch.tensor([[0.5]]), torch.tensor([[1]]))
        builder.add(best)
        builder.advance(best)
    assert "path_probs" not in vars(frontier)
    assert frontier.path_probs.tolist() == [0.25]


@pytest.mark.parametrize("name", sage.POLICIES)
def test_every_policy_gets_its_kind_of_builder(name: str) -> None:
    policy = make(name, {})
    builder = new_builder(policy, 7, CPU)
    frontier = builder.open_level(torch.full((1, K), 1 / K), torch.arange(K)[None])
    next_level = policy.next_level(frontier) if policy.num_candidates else None
    assert isinstance(builder, HostBuilder) == policy.is_on_host
    assert next_level is None or isinstance(next_level.picks, Tensor) != policy.is_on_host

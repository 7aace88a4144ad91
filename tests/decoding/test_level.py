"""Tree builders against trees grown and pruned one operation at a time, for every policy."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy_helpers import SMALL, SlowTree, add_next_level, make_policy

from sage.planning.base import Policy
from sage.planning.tree import DROPPED, NextLevel, Tree, TreeBuilder
from sage.runtime.host_tensors import CPU

K = 12
policies = st.sampled_from([case for case in SMALL if case[0] != "autoregressive"])
few = settings(max_examples=40, deadline=None)


def make(name: str, options: dict[str, Any]) -> Policy:
    policy = make_policy(name, options)
    policy.reset()
    policy.begin()
    return policy


def candidates(seed: int, node: int) -> tuple[list[float], list[int]]:
    """Returns synthetic candidates below a node: probabilities, descending, and distinct tokens."""
    generator = random.Random(f"{seed} {node}")
    logits = torch.tensor([generator.gauss(0, 2) for _ in range(K)])
    return logits.softmax(0).sort(descending=True).values.tolist(), generator.sample(range(100), K)


def grow(policy: Policy, seed: int, levels: int) -> tuple[TreeBuilder, SlowTree]:
    """Builds one round with a builder and with `SlowTree`."""
    builder, slow, frontier = TreeBuilder(7, CPU), SlowTree.of_token(7), torch.tensor([0])
    for level in range(1, levels + 1):
        topk = [candidates(seed, node) for node in frontier.tolist()]
        count = min(policy.num_candidates_at(level), K)
        probs, tokens = (torch.tensor([row[:count] for row in column]) for column in zip(*topk, strict=True))
        seen = builder.open_level(probs, tokens)
        assert seen[:2] == (level, probs.tolist()) and seen.ends() == []
        slow.note_candidates(frontier, probs, tokens)
        next_level = policy.next_level(seen)
        if next_level is None:
            break
        builder.add(next_level)
        parents, frontier = frontier, add_next_level(slow, frontier, next_level, probs, tokens)
        if len(frontier) == 0 or level == levels:
            break
        rows, expanded_tokens = builder.advance(next_level)
        assert torch.equal(torch.as_tensor(expanded_tokens), slow.tokens[frontier])
        assert torch.equal(parents[rows], slow.parents[frontier])
    return builder, slow


def check_same(fast: Tree, slow: SlowTree) -> None:
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(fast, name), getattr(slow, name)), name
    assert fast.columns == slow.columns and fast.depth == slow.depth
    assert list(fast.draft_topk) == slow.draft_topk


@few
@given(policies, st.integers(0, 999), st.integers(1, 6))
def test_a_built_tree_equals_the_tree_grown_step_by_step(case: tuple[str, dict[str, Any]], seed: int, levels: int) -> None:
    policy = make(*case)
    builder, slow = grow(policy, seed, levels)
    check_same(builder.tree(), slow)
    keep = policy.select()
    if keep is not None:
        check_same(builder.tree(keep), slow.subtree(torch.tensor(keep)))


@few
@given(policies, st.integers(0, 999), st.data())
def test_any_ancestor_closed_selection_is_kept_and_no_other(case, seed, data):
    builder, slow = grow(make(*case), seed, 5)
    keep = {0}
    for node in data.draw(st.sets(st.integers(0, len(slow) - 1))):
        while node > 0:
            keep.add(node)
            node = int(slow.parents[node])
    luck = data.draw(st.randoms(use_true_random=False))
    order, rest = [0], sorted(keep)[1:]
    while rest:  # any order with parents before children
        order.append(luck.choice([node for node in rest if int(slow.parents[node]) in order]))
        rest.remove(order[-1])
    check_same(builder.tree(order), slow.subtree(torch.tensor(order)))
    inner = sorted(set(slow.parents[torch.tensor(order)].tolist()) - {-1})
    if inner:
        dropped = data.draw(st.sampled_from(inner))
        with pytest.raises(AssertionError, match=DROPPED):
            builder.tree([node for node in order if node != dropped])


def test_ends_are_the_candidates_that_end_the_answer() -> None:
    builder = TreeBuilder(7, CPU, eos=(4, 9))
    assert builder.open_level(torch.tensor([[0.5, 0.3, 0.1]]), torch.tensor([[4, 2, 9]])).ends() == [0, 2]
    builder.add(NextLevel([1, 2], [1, 2]))
    builder.advance(NextLevel([1, 2], [1, 2]))
    assert builder.open_level(torch.full((2, 3), 0.3), torch.tensor([[1, 2, 3], [1, 4, 3]])).ends() == [4]
    assert TreeBuilder(7, CPU).open_level(torch.ones(1, 1), torch.tensor([[4]])).ends() == []

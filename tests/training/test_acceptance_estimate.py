"""Chains simulated from the agreements of a batch, compared with a naive walk."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sage.trees.chain import Chain
from train.config.schema import DecodeConfig
from train.monitor.metrics import ChainEstimate, answers, chain_depth, simulate


def rows(*bits: str) -> torch.Tensor:
    return torch.tensor([[bit == "1" for bit in row] for row in bits])


def test_each_depth_reads_its_unrolled_step() -> None:
    """Step 1 of an unrolled draft is wrong everywhere, so a chain keeps one token however often step 0 is right."""
    mask = torch.ones(1, 6, dtype=torch.bool)
    assert simulate(rows("111111", "000000"), mask, 5).tolist() == [6, 3]
    assert simulate(rows("111111", "111111"), mask, 5).tolist() == [6, 1]


def test_a_chain_does_not_reach_into_the_next_answer() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 0, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool)
    assert answers(mask) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert simulate(rows("1" * 8), mask, 5).tolist() == [8, 4]
    assert answers(torch.zeros(2, 3, dtype=torch.bool)) == []


def naive(agree: list[bool], depth: int) -> int:
    """Token by token, as a decoder emits them."""
    passes, at = 0, 0
    while at < len(agree):
        passes += 1
        for _ in range(depth):
            if at < len(agree) and agree[at]:
                at += 1
            else:
                break
        at += 1  # the target's own token
    return passes


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 8))
def test_simulation_is_the_naive_walk(agree: list[bool], depth: int) -> None:
    mask = torch.ones(1, len(agree), dtype=torch.bool)
    assert simulate(torch.tensor([agree]), mask, depth).tolist() == [len(agree), naive(agree, depth)]


def test_micro_batches_add_up_until_popped() -> None:
    """The example in the module takes two passes; without agreement, a pass yields one token."""
    estimate = ChainEstimate(3)
    for agree in ("1110111", "0000"):
        estimate.add(rows(agree), torch.ones(1, len(agree), dtype=torch.bool))
    assert estimate.pop().tolist() == [11, 6]
    assert estimate.pop().tolist() == [0, 0]


def test_the_depth_is_that_of_the_measured_chain() -> None:
    assert chain_depth(DecodeConfig(policies=[], num_prompts=1, max_new_tokens=2, options={"chain": {"depth": 7}})) == 7
    assert chain_depth(DecodeConfig(policies=[], num_prompts=1, max_new_tokens=2)) == Chain.depth

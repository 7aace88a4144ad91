"""The P-EAGLE head: the mask of its training, a decoded block against the same block in training, lossless decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import cut, in_float64, make_inputs, random_draft
from torch import Tensor

import sage
from sage.drafts.draft import new_session

BLOCK = 4


def read_all(target: sage.Target, draft: Any, inputs: dict[str, Tensor]) -> tuple[Any, Any, Tensor]:
    """Prompt, target features and the training rows [P, K, D] of every pair of one sequence."""
    prompt = target.embed(inputs)
    features = target.features(prompt, draft.levels)
    pairs = prompt.embeds.shape[1] - 1
    with torch.no_grad():
        fused = draft.fuse(features)[:, :-1]
        roots = torch.arange(pairs)[None]
        rows = draft.roll_out(prompt.embeds[:, 1:], fused, prompt.position_ids[..., :-1], roots, (pairs,) * BLOCK)
    return prompt, features, rows.view(BLOCK, pairs, -1).transpose(0, 1)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_decoded_block_is_the_block_of_training(tiny_target: sage.Target, layers: int) -> None:
    """A session that has read up to a pair, and one that has committed two and one more, in float64."""
    inputs = in_float64(tiny_target, make_inputs(tiny_target, length=22))
    draft = random_draft(tiny_target, "peagle", seed=3, block_size=BLOCK, num_layers=layers)
    prompt, features, expected = read_all(tiny_target, draft, inputs)
    tokens = inputs["input_ids"][0]
    first = int(prompt.visual_mask[0].nonzero().max()) + 1  # the first root after the image
    session: Any = new_session(draft, tiny_target, 64)
    known = prompt.at(torch.arange(first + 1))
    known.next_position = tiny_target.embed(cut(inputs, first + 1)).next_position
    logits = session.prefill(known, features.at(torch.arange(first + 1)), tokens[first + 1 : first + 2])
    at = first
    for count in (2, 1, 1):
        torch.testing.assert_close(session._hidden, expected[at], atol=1e-11, rtol=1e-11)
        torch.testing.assert_close(logits, draft.logits(expected[at, :1], tiny_target), atol=1e-11, rtol=1e-11)
        for level in range(1, BLOCK):
            below = session.expand(torch.tensor([0, 0]), torch.tensor([5, 6]))
            assert torch.equal(below, session._logits[level].expand(2, -1))
        pairs = torch.arange(at + 1, at + 1 + count)
        logits = session.commit(features.at(pairs), tokens[pairs + 1])
        at += count
    torch.testing.assert_close(session._hidden, expected[at], atol=1e-11, rtol=1e-11)
    assert session.context == at + 1 <= len(tokens) - BLOCK  # slots beyond the last pair have no position of their own


def test_negative_control_later_pairs_and_other_rollouts_are_masked(tiny_qwen: sage.Target) -> None:
    """A feature reaches the rows of its own pair and of later roots alone, whatever other rollouts there are."""
    draft = random_draft(tiny_qwen, "peagle", seed=3, block_size=3, num_layers=2).double()
    embeds, features = torch.randn(2, 1, 8, 32, dtype=torch.float64)
    positions, roots = torch.arange(8).expand(3, 1, 8), torch.tensor([[6, 2, 5, 4]])
    spoilt = features.clone()
    spoilt[:, 5] += 1
    one, other = (draft.roll_out(embeds, states, positions, roots, (4, 3, 2)) for states in (features, spoilt))
    changed = (one != other).any(-1)[0].tolist()
    assert changed == [True, False, True, False, True, False, True, True, False]
    alone = draft.roll_out(embeds, features, positions, roots[:, 1:2], (1, 1))
    torch.testing.assert_close(alone[0], one[0, [1, 5]], atol=1e-12, rtol=1e-12)

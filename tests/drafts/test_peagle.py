"""The P-EAGLE head: the mask of its training, a decoded block against the same block in training, lossless decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import refused
from support.models import cut, in_float64, make_inputs, random_draft
from support.pass_helpers import capture_with, quick_wrappers, without_compiler
from support.synchronizations import new_policy
from torch import Tensor

import sage
from sage.drafts.draft import new_session
from sage.drafts.rollout import visible_to_rows
from sage.runtime.captured import call_again
from sage.runtime.compiled import Compiled
from sage.runtime.executors import EAGER
from sage.runtime.joint import COMMIT_ORDER, BoundPass
from sage.runtime.pass_modes import PassMode

BLOCK = 4


def test_the_mask_is_that_of_every_row_by_hand() -> None:
    """Every row against its definition, for two sequences and rollouts of different lengths."""
    roots, sizes, pairs = torch.tensor([[1, 3, 0], [4, 2, 4]]), (3, 2, 2, 1), 5
    visible = visible_to_rows(roots, sizes, pairs)
    rows = [(step, rollout) for step, size in enumerate(sizes) for rollout in range(size)]
    keys: list[Any] = [*range(pairs), *rows[sizes[0] :]]
    for batch in range(2):
        for row, (step, rollout) in enumerate(rows):
            expected = [
                key <= int(roots[batch, rollout]) if isinstance(key, int) else key[1] == rollout and key[0] <= step
                for key in keys
            ]
            assert visible[batch, row].tolist() == expected, (batch, row)


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


@pytest.fixture
def draft(tiny_qwen: sage.Target) -> Any:
    return random_draft(tiny_qwen, "peagle", seed=1, block_size=BLOCK, num_layers=2).eval()


@pytest.mark.parametrize("mode", ["eager", "compiled", "captured"])
@pytest.mark.parametrize("policy", sage.POLICIES)
def test_decoding_is_lossless(
    policy: str, mode: str, tiny_qwen: sage.Target, draft: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At temperature 0 and by seed at temperature 1; deeper trees than the block stop at its end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    without_compiler(monkeypatch)
    capture_with(monkeypatch, call_again)
    inputs = make_inputs(tiny_qwen)
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        tiny_qwen.passes = PassMode.eager
        plain = sage.generate(tiny_qwen, None, inputs, "autoregressive", max_new_tokens=10, **options)
        tiny_qwen.passes = PassMode(mode)
        out = sage.generate(tiny_qwen, draft, inputs, new_policy(policy), max_new_tokens=10, **options)
        assert torch.equal(out.tokens, plain.tokens)


@pytest.mark.slow
def test_its_pass_is_compiled(tiny_qwen: sage.Target, draft: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quick_wrappers(monkeypatch)
    inputs = make_inputs(tiny_qwen)
    prompt = tiny_qwen.embed(inputs)
    features = tiny_qwen.features(prompt, draft.levels)
    (function,) = draft.pass_functions(tiny_qwen)
    results = []
    for executor in (EAGER, Compiled()):
        session: Any = new_session(draft, tiny_qwen, 64)
        session._commit = BoundPass(executor, function, COMMIT_ORDER)
        session.prefill(prompt, features, torch.tensor([7]))
        results.append([session.commit(features.at(torch.arange(3)), torch.arange(3) + 5), session._logits])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
    (compiled,) = function.kept.values()
    assert len(compiled.packages) == 1 and None not in compiled.packages.values()


def test_bad_sizes_are_refused(tiny_qwen: sage.Target) -> None:
    levels = {"feature_levels": [1, 2, 3]}
    with refused("draft.block_size", "1", "at least 2"):
        sage.new_draft(tiny_qwen, "peagle", block_size=1, **levels)
    with refused("draft.mask_token=999", "330"):
        sage.new_draft(tiny_qwen, "peagle", mask_token=999, **levels)
    with refused("draft.feature_levels", "3 layers"):
        sage.new_draft(tiny_qwen, "peagle")

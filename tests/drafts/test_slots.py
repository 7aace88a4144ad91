"""Heads with slots, of both kinds: what slots attend to, losslessness in every pass mode, and bad input."""

from typing import Any

import pytest
import torch
from support.accelerator import IS_SUPPORTED, on_device
from support.family_passes import Exported
from support.messages import refused
from support.models import SLOT_HEADS, VOCABULARY, make_inputs, slot_head
from support.pass_helpers import (
    Uncompiled,
    answer,
    call_again,
    capture_with,
    slow_except,
    without_compiler,
)
from support.synchronizations import count_rounds
from support.toy_helpers import make_policy

import sage
from sage.costs.measure import measure_costs
from sage.drafts.draft import new_session
from sage.runtime.modes import PassMode
from sage.runtime.pass_function import EAGER
from sage.targets import Features

POLICIES = [name for name in sage.POLICIES if name != "autoregressive"]


@pytest.mark.parametrize("form", slow_except(("mlp",), SLOT_HEADS))
def test_every_policy_is_lossless_in_every_pass_mode(form, tiny_qwen, monkeypatch):
    """Greedy, and by seed with eager passes; trees are those of eager ones, and deeper ones stop at the end of the block."""
    without_compiler(monkeypatch)
    capture_with(monkeypatch, call_again)
    draft, accepted = slot_head(tiny_qwen, form), 0
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        plain, _ = answer(tiny_qwen, draft, PassMode.eager, "autoregressive", **options)
        for name in POLICIES if form == "mlp" else ("chain", "eagle2", "cost_aware"):
            modes = [PassMode.eager]
            if not options and name in ("chain", "eagle2"):  # a level of one node, and siblings
                modes += [PassMode.compiled, PassMode.captured]
            tokens, trees = zip(*(answer(tiny_qwen, draft, mode, make_policy(name), **options) for mode in modes), strict=True)
            assert all(found == plain for found in tokens)
            assert all(found == trees[0] for found in trees)
            assert max(depth for _, depth, _ in trees[0]) <= draft.num_levels
            accepted += sum(row[2] for row in trees[0])
    assert accepted > 0


@pytest.mark.parametrize("mode", [PassMode.captured, PassMode.compiled])
@pytest.mark.parametrize("form", SLOT_HEADS)
def test_rounds_of_other_modes_have_the_logits_of_eager_ones(form, mode, tiny_qwen, monkeypatch):
    """A short prompt is read like accepted tokens, visual embeddings included. A graph is also run while it is captured, when
    its arguments are padding alone; no row of the cache may change then."""
    capture_with(monkeypatch, call_again)
    without_compiler(monkeypatch)
    draft, generator = slot_head(tiny_qwen, form), torch.Generator().manual_seed(0)
    prompt, root = tiny_qwen.embed(make_inputs(tiny_qwen)), torch.tensor([5])
    read, sessions, logits = tiny_qwen.features(prompt, draft.levels), [], []
    for number, passes in enumerate((PassMode.eager, mode)):
        tiny_qwen.passes = passes
        sessions.append(new_session(draft, tiny_qwen, 60))
        logits.append(sessions[number].prefill(prompt, read, root))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    for length, width in ((1, 3), (4, 1), (2, 5)):
        states = torch.randn(1 + len(draft.levels), 1, length, tiny_qwen.hidden_size, generator=generator)
        features, tokens = Features(states[0], tuple(states[1:])), list(range(9, 9 + length))
        rows, nodes = torch.zeros(width, dtype=torch.long), list(range(20, 20 + width))
        for results in zip(*([one.commit(features, tokens), one.expand(rows, nodes)] for one in sessions), strict=True):
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("form", "options"), [("dspark", {}), ("mlp", {"vocabulary": torch.arange(3, VOCABULARY, 2)})])
def test_nodes_on_the_greedy_path_take_no_pass(form: str, options: dict[str, Any], tiny_qwen: sage.Target) -> None:
    """Their logits and candidates are those of the correction, which nodes with a sibling take."""
    draft, prompt = slot_head(tiny_qwen, form, **options), tiny_qwen.embed(make_inputs(tiny_qwen))
    features, root, row = tiny_qwen.features(prompt, draft.levels), torch.tensor([5]), torch.zeros(1, dtype=torch.long)
    alone, beside = (new_session(draft, tiny_qwen, 60) for _ in range(2))
    logits, _ = (session.prefill(prompt, features, root) for session in (alone, beside))
    for _ in range(draft.num_levels - 1):
        (token,) = alone.propose(logits, 1).tokens[0].tolist()
        needed = alone.expand_pass(row, [token])
        assert isinstance(needed, torch.Tensor)
        logits, expected = needed, beside.expand(torch.zeros(2, dtype=torch.long), [token, 9])[:1]
        torch.testing.assert_close(logits, expected)
        for found, own in zip(alone.propose(logits, 3), beside.propose(expected, 3), strict=True):
            torch.testing.assert_close(found, own)


@pytest.mark.parametrize("form", ["mlp", "peagle"])
def test_an_answer_shorter_than_the_block_and_a_pruned_prompt_decode(form: str, tiny_qwen: sage.Target) -> None:
    draft, inputs = slot_head(tiny_qwen, form), make_inputs(tiny_qwen)
    for length in (1, 2, 3, 12):
        plain = sage.generate(tiny_qwen, None, inputs, "autoregressive", max_new_tokens=length).tokens
        for ratio in (0.0, 0.5):
            pruning = sage.drafts.pruning.Pruning(ratio, "uniform")
            out = sage.generate(tiny_qwen, draft, inputs, "chain", max_new_tokens=length, pruning=pruning)
            assert torch.equal(out.tokens, plain)


@pytest.mark.slow
def test_its_exported_functions_have_the_trees_of_eager_ones(tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the compiler gets them; the target's passes run eagerly, and tests/passes/test_compiled.py compiles them."""
    without_compiler(monkeypatch)
    monkeypatch.setattr(Uncompiled, "bind", Exported.bind)
    monkeypatch.setattr("sage.targets.tree_passes.executor_of", lambda mode: EAGER)
    draft = slot_head(tiny_qwen, "mlp", block_size=6)
    assert answer(tiny_qwen, draft, PassMode.compiled, "eagle2") == answer(tiny_qwen, draft, PassMode.eager, "eagle2")


@pytest.mark.skipif(not IS_SUPPORTED, reason="this torch cannot register a device type written in Python")
@pytest.mark.parametrize("form", SLOT_HEADS)
@pytest.mark.parametrize(("policy", "temperature"), [("static", 0.0), ("chain", 1.0)])
def test_it_is_captured_on_a_device(form, policy, temperature, traffic, tiny_qwen, monkeypatch):
    """The host waits once for each level of the draft and once for the target."""
    capture_with(monkeypatch, call_again)
    draft, inputs = slot_head(tiny_qwen, form), make_inputs(tiny_qwen)
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": temperature, "seed": 1}
    expected = sage.generate(tiny_qwen, draft, inputs, make_policy(policy), **options).tokens.tolist()
    tiny_qwen.passes = PassMode.captured
    on_device(draft)
    on_device(tiny_qwen)
    counts = count_rounds(traffic, tiny_qwen, draft, inputs, make_policy(policy), **options)
    assert counts.tokens == expected
    for one in counts.rounds:
        assert one.synchronizations <= one.levels + 1, counts.lines
        assert one.blocking_uploads == 0


@pytest.mark.slow
def test_costs_have_a_part_per_round_and_a_part_per_level(tiny_qwen: sage.Target) -> None:
    costs, _ = measure_costs(tiny_qwen, slot_head(tiny_qwen, "mlp"), 20, 40)
    assert costs.commit_s is not None and costs.drafting_s([0, 1, 2]) == [costs.commit_s, costs.draft(1), costs.draft(2)]
    assert costs.commit_s > costs.draft(1)


@pytest.mark.parametrize(
    ("form", "options", "parts"),
    [
        ("mlp", {"block_size": 1}, ("draft.block_size: 1; allowed: at least 2",)),
        ("peagle", {"block_size": 1}, ("draft.block_size: 1; allowed: at least 2",)),
        ("mlp", {"conditional": "rnn"}, ("draft.conditional: 'rnn' is not allowed; give one of none, markov, mlp",)),
        ("mlp", {"mask_token": VOCABULARY}, (f"draft.mask_token={VOCABULARY}: allowed: below",)),
        ("mlp", {"compressor": {"kind": "pool", "ratio": 2}}, ("draft.compressor: a block head reads the features",)),
        ("peagle", {"feature_levels": None}, ("draft.feature_levels", "3 layers")),
    ],
)
def test_what_does_not_fit_is_refused(form, options, parts, tiny_qwen):
    given = {key: value for key, value in (SLOT_HEADS[form] | options).items() if value is not None}
    with refused(*parts):
        sage.new_draft(tiny_qwen, **given)


def test_the_mask_token_is_one_that_the_target_does_not_use(tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    assert slot_head(tiny_qwen, "mlp").config.mask_token == tiny_qwen.family.slots["video"]
    assert slot_head(tiny_qwen, "peagle").config.mask_token == 0, "engines feed placeholders to it"
    video = tiny_qwen.family.slots["video"]
    monkeypatch.setattr(tiny_qwen, "eos_token_ids", [0, 1])
    assert slot_head(tiny_qwen, "peagle").config.mask_token == video, "padding ends answers"
    monkeypatch.setattr(tiny_qwen, "eos_token_ids", [1])
    monkeypatch.setattr(tiny_qwen.family, "slots", {})
    assert slot_head(tiny_qwen, "mlp").config.mask_token == 0, "the padding token"
    monkeypatch.setattr(tiny_qwen, "eos_token_ids", [0, 1])
    with refused("has no unused token", "give draft.mask_token=ID"):
        slot_head(tiny_qwen, "mlp")
    assert slot_head(tiny_qwen, "mlp", mask_token=7).config.mask_token == 7

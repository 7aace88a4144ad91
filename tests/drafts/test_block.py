"""Block heads: what slots attend to, training against decoding, losslessness in every pass mode, loss, and bad input."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.accelerator import IS_SUPPORTED, Traffic, on_device
from support.messages import refused
from support.models import VOCABULARY, in_double, make_inputs, make_qwen, padded_batch, random_draft
from support.pass_helpers import answer, capture_with, quick_wrappers, with_eager_target, without_compiler
from support.synchronizations import count_rounds, new_policy
from torch import Tensor

import sage
from sage.costs.measure import measure_costs
from sage.drafts.block import BlockDraft
from sage.drafts.draft import new_session
from sage.drafts.head_session import SlotSession
from sage.drafts.rollout import visible_to_rows
from sage.runtime.captured import call_again
from sage.runtime.compiled import Compiled
from sage.runtime.pass_modes import PassMode
from sage.targets import Features
from train.config.schema import ObjectiveConfig
from train.distill.anchors import draw_anchors, within_turns
from train.distill.objective import Objective
from train.distill.slots import SlotStudent
from train.distill.teacher import Teacher

SMALL = {"feature_levels": [1, 3], "block_size": 4, "conditional_rank": 5}
FORMATS: dict[str, dict[str, Any]] = {
    "dflash": {"feed": False, "conditional": "none"},
    "dspark": {"feed": False, "conditional": "markov", "causal": True, "num_layers": 2},
    "mlp": {"feed": True, "conditional": "mlp", "num_layers": 2},
}
POLICIES = [name for name in sage.POLICIES if name != "autoregressive"]


def block(target: sage.Target, form: str = "mlp", **options: Any) -> BlockDraft:
    draft: BlockDraft = random_draft(target, "block", **(SMALL | FORMATS[form] | options)).eval()
    return draft


@pytest.mark.parametrize(("is_causal", "sizes"), [(False, (2, 2, 2)), (True, (2, 2, 1))])
def test_slots_see_the_context_before_their_anchor_and_their_block(is_causal: bool, sizes: tuple[int, ...]) -> None:
    anchors, length = torch.tensor([[3, 1], [5, 5]]), 5
    found = visible_to_rows(anchors - 1, sizes, length, is_root_slot=True, is_causal=is_causal)
    rows = [(slot, anchor) for slot, size in enumerate(sizes) for anchor in range(size)]
    expected = torch.zeros(2, len(rows), length + len(rows), dtype=torch.bool)
    for batch, (row, (slot, anchor)) in itertools.product(range(2), enumerate(rows)):
        for token in range(length):
            expected[batch, row, token] = token < anchors[batch, anchor]
        for key, (other, owner) in enumerate(rows):
            expected[batch, row, length + key] = owner == anchor and (not is_causal or other <= slot)
    assert torch.equal(found, expected)


# -- training and decoding -------------------------------------------------------------------------------------------------


def chain_logits(session: SlotSession, first: Tensor, tokens: list[int]) -> Tensor:
    """The logits [K, V] below the root and the chain of `tokens`."""
    rows = torch.zeros(1, dtype=torch.long)
    return torch.cat([first, *(session.expand(rows, [token]) for token in tokens)])


def level_logits(
    draft: BlockDraft, target: sage.Target, tokens: Tensor, states: Tensor, embeds: Tensor | None = None
) -> Tensor:
    """The logits [K, V] of the levels of a block with hidden states [K, D]; `tokens` [K + 1] are the anchor's predecessor, the
    anchor and the tokens after it, `embeds` their embeddings."""
    if draft.path_head is not None:
        embeds = target.embed_tokens(tokens) if embeds is None else embeds
        last, before = embeds[1:], embeds[:-1]
        return target.lm_head(states + draft.path_head.out(draft.path_head(last, before, states)))
    logits = target.lm_head(states)
    return logits if draft.markov_head is None else logits + draft.markov_head.markov_w2(draft.markov_head(tokens[1:]))


@pytest.mark.parametrize("form", FORMATS)
def test_a_block_from_the_cache_is_the_block_of_training(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In three rounds, with trees in between; also for an answer that the draft reads without images. One slot too far in the
    rope is the negative control."""
    target = make_qwen()
    target.model.double()
    draft, prompt = block(target, form), target.embed(in_double(make_inputs(target)))
    features, ids = target.features(prompt, draft.levels), prompt.input_ids[0].tolist()
    levels = draft.num_levels
    with torch.no_grad():
        anchors = torch.tensor([[10, 11]])
        hidden = draft.read_blocks(draft.fuse(features), anchors, prompt.embeds[:, anchors[0]], [2] * levels)[0]
        expected = []
        for anchor, states in zip((10, 11), hidden.view(levels, 2, -1).unbind(1), strict=True):
            expected.append(level_logits(draft, target, torch.tensor(ids[anchor - 1 : anchor + levels]), states))
    for shift, is_equal in ((0, True), (1, False)):
        session = new_session(draft, target, 40)
        assert isinstance(session, SlotSession) and session.max_depth == levels
        read = torch.arange(10)
        if shift:
            monkeypatch.setattr(session, "_set_origin", lambda position, set_=session._set_origin: set_(position + 1))
        first = session.prefill(prompt.at(read), features.at(read), prompt.input_ids[0, 10:11])
        found = [chain_logits(session, first, ids[11 : 10 + levels])]
        first = session.commit(features.at(torch.tensor([10])), [ids[11]])
        found.append(chain_logits(session, first, ids[12 : 11 + levels]))
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.allclose(mine, theirs, rtol=0, atol=1e-10) == is_equal
        assert session.context == 11


def test_a_causal_block_of_few_levels_has_the_rows_of_a_complete_one(double: sage.Target) -> None:
    draft, prompt = block(double), double.embed(in_double(make_inputs(double)))
    context = draft.fuse(double.features(prompt, draft.levels))
    anchors = torch.tensor([[6, 9, 4]])
    inputs = context, anchors, prompt.embeds[:, anchors[0]]
    complete = draft.read_blocks(*inputs, [3] * 4)[0].view(4, 3, -1)
    few = draft.read_blocks(*inputs, [3, 2, 1, 1])[0]
    expected = torch.cat([rows[:size] for rows, size in zip(complete, (3, 2, 1, 1), strict=True)])
    torch.testing.assert_close(few, expected, rtol=1e-10, atol=1e-12)


def test_a_draft_that_is_trained_further_decodes_with_its_new_weights(tiny_qwen: sage.Target) -> None:
    """What depends on a token alone, and the product of lm_head and the path head's output map, are kept between requests."""
    draft, prompt = block(tiny_qwen), tiny_qwen.embed(make_inputs(tiny_qwen))
    head = draft.path_head
    assert head is not None
    features, path = tiny_qwen.features(prompt, draft.levels), torch.tensor([int(prompt.input_ids[0, -1]), 5])
    for changed in (None, head.out, head.token, head.parent, head.hidden):
        if changed is not None:
            with torch.no_grad():
                changed.weight.neg_()
        session = new_session(draft, tiny_qwen, 60)
        logits = session.prefill(prompt, features, torch.tensor([5]))
        expected = level_logits(draft, tiny_qwen, path, session._hidden[:1])  # type: ignore[attr-defined]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mode", ["compiled", "captured"])
@pytest.mark.parametrize("form", FORMATS)
def test_every_policy_is_lossless_in_every_pass_mode(
    form: str, mode: str, tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and by seed; the trees are those of eager passes."""
    without_compiler(monkeypatch)
    capture_with(monkeypatch, call_again)
    draft, accepted = block(tiny_qwen, form), 0
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        plain, _ = answer(tiny_qwen, draft, PassMode.eager, "autoregressive", **options)
        for name in POLICIES:
            policies = [new_policy(name) for _ in range(2)]
            eager = answer(tiny_qwen, draft, PassMode.eager, policies[0], **options)  # type: ignore[arg-type]
            other = answer(tiny_qwen, draft, PassMode(mode), policies[1], **options)  # type: ignore[arg-type]
            assert eager[0] == other[0] == plain and (eager[1] == other[1] or name == "cost_aware"), "which learns from timings"
            assert max(depth for _, depth, _ in eager[1]) <= draft.num_levels
            accepted += sum(row[2] for row in eager[1])
    assert accepted > 0


@pytest.mark.parametrize("form", FORMATS)
def test_captured_rounds_have_the_logits_of_eager_ones(
    form: str, tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is also run while it is captured, when its arguments are padding alone; no row of the cache may change then."""
    capture_with(monkeypatch, call_again)
    draft, generator = block(tiny_qwen, form), torch.Generator().manual_seed(0)
    sessions = []
    for mode in (PassMode.eager, PassMode.captured):
        tiny_qwen.passes = mode
        sessions.append(new_session(draft, tiny_qwen, 60))
    prompt = tiny_qwen.embed(make_inputs(tiny_qwen))
    for session in sessions:
        session.prefill(prompt, tiny_qwen.features(prompt, draft.levels), torch.tensor([5]))
    for length, width in ((1, 3), (4, 1), (2, 5)):
        states = torch.randn(3, 1, length, tiny_qwen.hidden_size, generator=generator)
        features, tokens = Features(states[0], tuple(states[1:])), list(range(9, 9 + length))
        rows, nodes = torch.zeros(width, dtype=torch.long), list(range(20, 20 + width))
        for results in zip(*([one.commit(features, tokens), one.expand(rows, nodes)] for one in sessions), strict=True):
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_an_answer_shorter_than_the_block_and_a_pruned_prompt_decode(tiny_qwen: sage.Target) -> None:
    draft, inputs = block(tiny_qwen), make_inputs(tiny_qwen)
    for length in (1, 2, 3, 12):
        plain = sage.generate(tiny_qwen, None, inputs, "autoregressive", max_new_tokens=length).tokens
        for ratio in (0.0, 0.5):
            pruning = sage.drafts.pruning.Pruning(ratio, "uniform")
            out = sage.generate(tiny_qwen, draft, inputs, "chain", max_new_tokens=length, pruning=pruning)
            assert torch.equal(out.tokens, plain)


def test_a_draft_vocabulary_restricts_the_proposals(tiny_qwen: sage.Target) -> None:
    ids = torch.arange(3, VOCABULARY, 2)
    draft = block(tiny_qwen, vocabulary=ids)
    session, prompt = new_session(draft, tiny_qwen, 60), tiny_qwen.embed(make_inputs(tiny_qwen))
    logits = session.prefill(prompt, tiny_qwen.features(prompt, draft.levels), torch.tensor([5]))
    path = torch.tensor([int(prompt.input_ids[0, -1]), 5])
    torch.testing.assert_close(logits, level_logits(draft, tiny_qwen, path, session._hidden[:1])[:, ids])
    assert set(session.propose(logits, 7)[1][0].tolist()) <= set(ids.tolist())


@pytest.mark.slow
def test_its_functions_are_compiled(tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The target's passes, which are compiled in tests/passes/test_compiled.py, run eagerly here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quick_wrappers(monkeypatch)
    with_eager_target(monkeypatch)
    draft = block(tiny_qwen, block_size=6)
    for policy in ("eagle2", "chain"):  # which expand siblings, and the most probable path
        eager = answer(tiny_qwen, draft, PassMode.eager, policy)
        assert answer(tiny_qwen, draft, PassMode.compiled, policy) == eager
    for function in draft.pass_functions(tiny_qwen):
        (compiled,) = [one for executor, one in function.kept.items() if isinstance(executor, Compiled)]
        assert compiled.packages and None not in compiled.packages.values()


@pytest.mark.skipif(not IS_SUPPORTED, reason="this torch cannot register a device type written in Python")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("policy", "temperature"), [("chain", 0.0), ("static", 0.0), ("chain", 1.0)])
def test_it_is_captured_on_a_device(
    form: str, policy: str, temperature: float, traffic: Traffic, tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits once for each level of the draft and once for the target."""
    capture_with(monkeypatch, call_again)
    draft, inputs = block(tiny_qwen, form), make_inputs(tiny_qwen)
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": temperature, "seed": 1}

    expected = sage.generate(tiny_qwen, draft, inputs, new_policy(policy), **options).tokens.tolist()
    tiny_qwen.passes = PassMode.captured
    on_device(draft)
    on_device(tiny_qwen)
    counts = count_rounds(traffic, tiny_qwen, draft, inputs, new_policy(policy), **options)
    assert counts.tokens == expected
    for one in counts.rounds:
        assert one.synchronizations <= one.levels + 1, counts.lines
        assert one.blocking_uploads == 0


def test_costs_have_a_part_per_round_and_a_part_per_level(tiny_qwen: sage.Target) -> None:
    costs = measure_costs(tiny_qwen, block(tiny_qwen), 20, 40)
    assert costs.commit_s is not None and costs.drafting_s([0, 1, 2]) == [costs.commit_s, costs.draft(1), costs.draft(2)]
    assert costs.commit_s > costs.draft(1)


# -- training --------------------------------------------------------------------------------------------------------------


def student_of(
    draft: BlockDraft, target: sage.Target, keep: Sequence[float] | None = None, **objective: Any
) -> tuple[SlotStudent, Teacher]:
    options: dict[str, Any] = {"ce_weight": 1.0, "feature_weight": 0.0, "step_decay": 0.5} | objective
    config, keep = ObjectiveConfig(**options, steps=draft.num_levels), keep or [1.0] * draft.num_levels
    student = SlotStudent(draft.requires_grad_(True), Objective(config), keep)
    return student, Teacher(target, levels=student.levels, token_map=student.token_map)


@pytest.fixture
def double() -> sage.Target:
    target = make_qwen()
    target.model.double()
    return target


@pytest.mark.parametrize("form", FORMATS)
def test_the_loss_is_that_of_every_block_alone(form: str, double: sage.Target) -> None:
    """All anchors of two sequences, one of them with two turns: value and gradient against one block at a time."""
    draft = block(double, form)
    student, teacher = student_of(draft, double)
    batch = in_double(padded_batch(double))
    batch["loss_mask"][0, 12:14] = 0
    pairs = teacher(batch)
    loss, sums, _ = student(pairs, teacher.lm_head)
    found = torch.autograd.grad(loss, list(draft.parameters()), allow_unused=True)
    weights = torch.tensor([0.5**k for k in range(draft.num_levels)], dtype=torch.float64)
    weights /= weights.sum()
    total = torch.zeros((), dtype=torch.float64)
    context = draft.fuse(pairs.features)
    for row, start in pairs.mask.nonzero().tolist():
        place, embeds = torch.tensor([[start + 1]]), pairs.embeds_next[[row], start][None]
        states = draft.read_blocks(context[[row]], place, embeds, [1] * draft.num_levels)[0]
        for level in range(draft.num_levels):
            pair = start + level
            if pair >= pairs.mask.shape[1] or not pairs.mask[row, pair]:
                break
            embeds, tokens = pairs.embeds_next[row, pair - 1 : pair + 1], batch["input_ids"][row, pair : pair + 2]
            logits = level_logits(draft, double, tokens, states[[level]], embeds)[0]
            p = double.lm_head(pairs.features_next[row, pair]).softmax(-1)
            total = total - weights[level] * (p * logits.log_softmax(-1)).sum()
    expected = torch.autograd.grad(total, list(draft.parameters()), allow_unused=True)
    torch.testing.assert_close(loss, total, rtol=1e-11, atol=0)
    assert int(sums[-1]) == int(pairs.mask.sum())
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-11)


def test_rows_end_with_the_turn() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1]]).bool()
    anchors = within_turns(draw_anchors(mask, None, [1.0] * 3), mask)
    rows = {int(root): scale.tolist() for root, scale in zip(anchors.root_BA[0], anchors.scale_BR.view(3, -1).T, strict=True)}
    assert rows == {2: [1, 1, 1], 3: [1, 1, 0], 4: [1, 0, 0], 6: [1, 0, 0]}


def test_a_micro_batch_without_anchors_adds_zero_to_every_gradient(double: sage.Target) -> None:
    """Otherwise other ranks would wait for its gradients."""
    draft = block(double, confidence=True)
    student, teacher = student_of(draft, double, anchors=4)
    pairs = teacher(in_double(padded_batch(double)))
    pairs.mask[:] = False
    loss, sums, _ = student(pairs, teacher.lm_head)
    assert float(loss.detach()) == 0 and not sums.any()
    assert not any(grad.any() for grad in torch.autograd.grad(loss, list(draft.parameters())))


def test_confidence_learns_the_acceptance_and_leaves_the_draft_alone(double: sage.Target) -> None:
    plain, sure = (block(double, confidence=confidence) for confidence in (False, True))
    sure.load_state_dict(plain.state_dict(), strict=False)
    grads = []
    for draft in (plain, sure):
        student, teacher = student_of(draft, double)
        loss = student(teacher(in_double(padded_batch(double))), teacher.lm_head)[0]
        loss.backward()
        grads.append({name: p.grad for name, p in draft.named_parameters()})
    assert grads[1]["confidence_head.proj.weight"].any()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad)


def test_pace_weighs_a_level_by_what_is_accepted_from_it_on(double: sage.Target) -> None:
    draft = block(double)
    student, teacher = student_of(draft, double, dpace_alpha=0.25)
    pairs = teacher(in_double(padded_batch(double)))
    output = student.predict(pairs, teacher.lm_head)
    from train.distill.objective import pace_weights

    rows = output.rows
    acceptance = torch.rand(len(rows.step), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = pace_weights(acceptance, rows, draft.num_levels, 0.25)  # type: ignore[arg-type]
    expected = torch.zeros_like(found)
    chains = rows.chain.unique().tolist()  # type: ignore[attr-defined]
    for chain in chains:
        own = (rows.chain == chain).nonzero()[:, 0]  # type: ignore[attr-defined]
        own = own[rows.step[own].argsort()]
        smooth = 0.75 * acceptance[own] + 0.25
        expected[own] = torch.stack([sum(smooth[: j + 1].prod() for j in range(k, len(own))) for k in range(len(own))])  # type: ignore
    expected /= expected.sum() / len(chains)
    torch.testing.assert_close(found, expected)
    assert student(pairs, teacher.lm_head)[0].isfinite()


# -- bad input -------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused(tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, words in (
        ({"block_size": 1}, "draft.block_size: 1; allowed: at least 2"),
        ({"conditional": "rnn"}, "draft.conditional: 'rnn' is not one of none, markov, mlp"),
        ({"mask_token": VOCABULARY}, f"draft.mask_token={VOCABULARY}: allowed: below"),
        ({"compressor": {"kind": "pool", "ratio": 2}}, "draft.compressor: a block head reads the features"),
    ):
        with refused(words):
            sage.new_draft(tiny_qwen, "block", **{**SMALL, **options})
    assert block(tiny_qwen).config.mask_token == tiny_qwen.family.slots["video"]
    monkeypatch.setattr(type(tiny_qwen.family), "placeholders", {})
    assert block(tiny_qwen).config.mask_token == 0, "the padding token"
    monkeypatch.setattr(tiny_qwen, "eos_token_ids", [0, 1])
    with refused("has no unused token", "give draft.mask_token=ID"):
        block(tiny_qwen)
    assert block(tiny_qwen, mask_token=7).config.mask_token == 7

"""Heads with slots in training: a block against the decoded one and against every block alone, conditionals, and the loss."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.models import SLOT_HEADS, VOCABULARY, Operators, cut, in_double, make_inputs, make_qwen, padded_batch, slot_head
from torch import Tensor

import sage
from sage.drafts.draft import new_session
from sage.drafts.head_session import SlotSession
from sage.drafts.spans import HeadInput
from train.config.schema import ObjectiveConfig
from train.distill.objective import Objective, pace_weights
from train.distill.rows import draw_anchors, within_turns
from train.distill.student import SlotStudent
from train.distill.teacher import Teacher


@pytest.fixture
def double() -> sage.Target:
    target = make_qwen()
    target.model.double()
    return target


def level_logits(draft: Any, target: sage.Target, tokens: Tensor, states: Tensor, embeds: Tensor | None = None) -> Tensor:
    """The logits [K, V] of the levels of a block with hidden states [K, D]; `tokens` [K + 1] are the anchor's predecessor, the
    anchor and the tokens after it, `embeds` their embeddings."""
    if draft.path_head is not None:
        embeds = target.embed_tokens(tokens) if embeds is None else embeds
        last, before = embeds[1:], embeds[:-1]
        states = states + draft.path_head.out(draft.path_head(last, before, states))
    logits = draft.logits(states, target)
    return logits if draft.markov_head is None else logits + draft.markov_head.markov_w2(draft.markov_head(tokens[1:]))


# -- training and decoding -------------------------------------------------------------------------------------------------


def chain_logits(session: SlotSession, first: Tensor, tokens: list[int]) -> Tensor:
    """The logits [K, V] below the root and the chain of `tokens`."""
    rows = torch.zeros(1, dtype=torch.long)
    return torch.cat([first, *(session.expand(rows, [token]) for token in tokens)])


@pytest.mark.parametrize("form", SLOT_HEADS)
def test_a_block_from_the_cache_is_the_block_of_training(form, double, monkeypatch):
    """In three rounds, with trees in between; also for an answer that the draft reads without images. One slot too far in the
    rope is the negative control."""
    inputs = in_double(make_inputs(double, length=22))
    draft, prompt = slot_head(double, form), double.embed(inputs)
    features, ids = double.features(prompt, draft.levels), prompt.input_ids[0].tolist()
    levels, first = draft.num_levels, int(prompt.visual_mask[0].nonzero().max()) + 1  # the first root after the image
    with torch.no_grad():
        pairs = HeadInput(prompt.embeds[:, 1:], draft.fuse(features)[:, :-1], prompt.position_ids[..., :-1])
        rows = draft.roll_out(pairs, torch.tensor([[first, first + 1]]), [2] * levels)[0].view(levels, 2, -1)
        expected = [
            level_logits(draft, double, torch.tensor(ids[root : root + levels + 1]), states)
            for root, states in zip((first, first + 1), rows.unbind(1), strict=True)
        ]
    for shift, is_equal in ((0, True), (1, False)):
        session = new_session(draft, double, 40)
        assert isinstance(session, SlotSession) and session.max_depth == levels
        read = torch.arange(first + 1)
        if shift:
            monkeypatch.setattr(session, "_set_origin", lambda position, set_=session._set_origin: set_(position + 1))
        known = prompt.at(read)
        known.next_position = double.embed(cut(inputs, first + 1)).next_position
        logits = session.prefill(known, features.at(read), prompt.input_ids[0, first + 1 : first + 2])
        found = [chain_logits(session, logits, ids[first + 2 : first + 1 + levels])]
        logits = session.commit(features.at(torch.tensor([first + 1])), [ids[first + 2]])
        found.append(chain_logits(session, logits, ids[first + 3 : first + 2 + levels]))
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.allclose(mine, theirs, rtol=0, atol=1e-10) == is_equal
        assert session.context == first + 2


@pytest.mark.parametrize("form", ["mlp", "peagle"])
def test_rows_depend_on_what_their_root_has_read_alone(form: str, double: sage.Target) -> None:
    """A feature reaches the rows of its own pair and of later roots, whatever other rollouts and levels there are."""
    draft = slot_head(double, form)
    num_levels, sizes = draft.num_levels, (4, 3, 2, 2, 2, 2)[: draft.num_levels]
    embeds, features = torch.randn(2, 1, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions, roots = torch.arange(9).expand(3, 1, 9), torch.tensor([[7, 2, 6, 4]])
    spoilt = features.clone()
    spoilt[:, 5] += 1
    one, other = (draft.roll_out(HeadInput(embeds, states, positions), roots, sizes)[0] for states in (features, spoilt))
    is_later = torch.cat([roots[0, :size] >= 5 for size in sizes])
    assert torch.equal((one != other).any(-1), is_later)
    alone = draft.roll_out(HeadInput(embeds, features, positions), roots[:, 1:2], [1] * num_levels)[0]
    starts = [sum(sizes[:level]) for level in range(num_levels)]
    torch.testing.assert_close(alone, one[[start + 1 for start in starts]], atol=1e-12, rtol=1e-12)


def test_a_draft_that_is_trained_further_decodes_with_its_new_weights(tiny_qwen: sage.Target) -> None:
    """What depends on a token alone, and the product of lm_head and the path head's output map, are kept between requests."""
    draft, prompt = slot_head(tiny_qwen, "mlp"), tiny_qwen.embed(make_inputs(tiny_qwen))
    head = draft.path_head
    features, path = tiny_qwen.features(prompt, draft.levels), torch.tensor([int(prompt.input_ids[0, -1]), 5])
    for changed in (None, head.out, head.token, head.parent, head.hidden):
        if changed is not None:
            with torch.no_grad():
                changed.weight.neg_()
        session: Any = new_session(draft, tiny_qwen, 60)
        logits = session.prefill(prompt, features, torch.tensor([5]))
        torch.testing.assert_close(logits, level_logits(draft, tiny_qwen, path, session._hidden[:1]), rtol=1e-4, atol=1e-3)


def test_a_draft_vocabulary_restricts_the_proposals(tiny_qwen: sage.Target) -> None:
    ids = torch.arange(3, VOCABULARY, 2)
    draft = slot_head(tiny_qwen, "mlp", vocabulary=ids)
    session: Any = new_session(draft, tiny_qwen, 60)
    prompt = tiny_qwen.embed(make_inputs(tiny_qwen))
    logits = session.prefill(prompt, tiny_qwen.features(prompt, draft.levels), torch.tensor([5]))
    path = torch.tensor([int(prompt.input_ids[0, -1]), 5])
    torch.testing.assert_close(logits, level_logits(draft, tiny_qwen, path, session._hidden[:1])[:, ids])
    assert set(session.propose(logits, 7)[1][0].tolist()) <= set(ids.tolist())


# -- training --------------------------------------------------------------------------------------------------------------


def student_of(
    target: sage.Target, draft: Any, keep: Sequence[float] | None = None, **objective: Any
) -> tuple[SlotStudent, Teacher, Any]:
    """A head in float64 with its teacher, and pairs of two sequences, one of them with two turns."""
    options: dict[str, Any] = {"ce_weight": 1.0, "feature_weight": 0.0, "step_decay": 0.5} | objective
    config = ObjectiveConfig(**options, steps=draft.num_levels)
    student = SlotStudent(draft.requires_grad_(True), Objective(config), keep or [1.0] * draft.num_levels)
    teacher = Teacher(target, levels=student.levels, token_map=student.token_map)
    batch = in_double(padded_batch(target))
    batch["loss_mask"][0, 12:14] = 0
    return student, teacher, teacher(batch)


def by_hand(student: SlotStudent, teacher: Teacher, pairs: Any) -> Tensor:
    """One pass for each supervised pair; the loss of its levels up to the end of the turn."""
    draft, total = student.draft, torch.zeros((), dtype=torch.float64)
    weights = torch.tensor([0.5**k for k in range(draft.num_levels)], dtype=torch.float64)
    context = draft.fuse(pairs.features)
    for row, start in pairs.mask.nonzero().tolist():
        inputs = (pairs.embeds_next[[row]], context[[row]], pairs.position_ids[..., [row], :])
        states = draft.roll_out(HeadInput(*inputs), torch.tensor([[start]]), [1] * draft.num_levels)[0]
        for level, pair in enumerate(range(start, min(start + draft.num_levels, pairs.mask.shape[1]))):
            if not pairs.mask[row, pair]:
                break
            embeds, tokens = pairs.embeds_next[row, pair - 1 : pair + 1], pairs.inputs["input_ids"][row, pair : pair + 2]
            logits = level_logits(draft, teacher.target, tokens, states[[level]], embeds)[0]
            p = (teacher.lm_head @ pairs.features_next[row, pair]).softmax(-1)
            total = total - weights[level] / weights.sum() * (p * logits.log_softmax(-1)).sum()
    return total


@pytest.mark.parametrize("form", SLOT_HEADS)
def test_the_loss_is_that_of_every_block_alone(form: str, double: sage.Target) -> None:
    """Value and gradient, with all anchors and all levels; peagle with its own vocabulary."""
    vocabulary = {"vocabulary": torch.arange(0, VOCABULARY, 3)} if form == "peagle" else {}
    draft = slot_head(double, form, **vocabulary)
    student, teacher, pairs = student_of(double, draft)
    loss, sums, _ = student(pairs, teacher.lm_head)
    total, parameters = by_hand(student, teacher, pairs), list(draft.parameters())
    torch.testing.assert_close(loss, total, rtol=1e-11, atol=0)
    assert int(sums[-1]) == int(pairs.mask.sum())
    gradients = (torch.autograd.grad(value, parameters, allow_unused=True) for value in (loss, total))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-11)


@pytest.mark.slow
def test_dropped_levels_and_few_anchors_keep_the_expectation(double: sage.Target) -> None:
    """The mean of 200 draws of two anchors, of which each level keeps half, within four standard errors."""
    draft = slot_head(double, "peagle")
    student, teacher, pairs = student_of(double, draft, [0.5**level for level in range(draft.num_levels)], anchors=2)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = float(by_hand(student, teacher, pairs))
        losses = torch.stack([student(pairs, teacher.lm_head)[0] for _ in range(200)])
    error = float(losses.std()) / 200**0.5
    assert 0 < error < 0.05 * expected and abs(float(losses.mean()) - expected) < 4 * error


def test_rows_end_with_the_turn() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1]]).bool()
    anchors = within_turns(draw_anchors(mask, None, [1.0] * 3), mask)
    rows = {int(root): scale.tolist() for root, scale in zip(anchors.root_BA[0], anchors.scale_BR.view(3, -1).T, strict=True)}
    assert rows == {2: [1, 1, 1], 3: [1, 1, 0], 4: [1, 0, 0], 6: [1, 0, 0]}


@pytest.mark.parametrize(
    ("form", "options"),
    [("mlp", {"confidence": True}), ("peagle", {}), ("peagle", {"compressor": {"kind": "pool", "ratio": 2}})],
)
def test_a_micro_batch_without_anchors_adds_zero_to_every_gradient(form, options, double):
    """Otherwise other ranks would wait for its gradients."""
    draft = slot_head(double, form, **options).double()
    student, teacher, pairs = student_of(double, draft, anchors=4)
    assert float(student(pairs, teacher.lm_head)[1][-1]) == int(pairs.mask.sum())
    pairs.mask[:] = False
    loss, sums, counts = student(pairs, teacher.lm_head)
    gradients = torch.autograd.grad(loss, list(draft.parameters()))
    assert not any(value.any() for value in (loss.detach(), sums, counts, *gradients))


def test_confidence_learns_the_acceptance_and_leaves_the_draft_alone(double: sage.Target) -> None:
    plain, sure = (slot_head(double, "mlp", confidence=confidence) for confidence in (False, True))
    sure.load_state_dict(plain.state_dict(), strict=False)
    gradients = []
    for draft in (plain, sure):
        student, teacher, pairs = student_of(double, draft)
        student(pairs, teacher.lm_head)[0].backward()
        gradients.append({name: parameter.grad for name, parameter in draft.named_parameters()})
    assert gradients[1]["confidence_head.proj.weight"].any()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_pace_weighs_a_level_by_what_is_accepted_from_it_on(double: sage.Target) -> None:
    draft = slot_head(double, "mlp")
    student, teacher, pairs = student_of(double, draft, dpace_alpha=0.25)
    rows: Any = student.predict(pairs, teacher.lm_head).rows
    acceptance = torch.rand(len(rows.step), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with Operators() as seen:
        found = pace_weights(acceptance, rows, draft.num_levels, 0.25)
    assert not any("cumsum" in name for name, _ in seen.calls), "on GPUs its kernel is refused with train.deterministic=true"
    expected = torch.zeros_like(found)
    chains = rows.chain.unique().tolist()
    for chain in chains:
        own = (rows.chain == chain).nonzero()[:, 0]
        own = own[rows.step[own].argsort()]
        smooth = 0.75 * acceptance[own] + 0.25
        expected[own] = torch.stack([sum(smooth[: j + 1].prod() for j in range(k, len(own))) for k in range(len(own))])  # type: ignore
    expected /= expected.sum() / len(chains)
    torch.testing.assert_close(found, expected)
    assert student(pairs, teacher.lm_head)[0].isfinite()

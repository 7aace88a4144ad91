"""Block heads: training against decoding, conditionals, and the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.models import VOCABULARY, in_double, make_inputs, make_qwen, padded_batch, slot_head
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sage
from sage.drafts.block import BlockDraft
from sage.drafts.draft import new_session
from sage.drafts.head_session import SlotSession
from train.config.schema import ObjectiveConfig
from train.distill.anchors import draw_anchors, within_turns
from train.distill.objective import Objective
from train.distill.slots import SlotStudent
from train.distill.teacher import Teacher

FORMATS = ("dflash", "dspark", "mlp")


def block(target: sage.Target, form: str = "mlp", **options: Any) -> BlockDraft:
    draft: BlockDraft = slot_head(target, form, **options)
    return draft


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


def test_a_draft_vocabulary_restricts_the_proposals(tiny_qwen: sage.Target) -> None:
    ids = torch.arange(3, VOCABULARY, 2)
    draft = block(tiny_qwen, vocabulary=ids)
    session, prompt = new_session(draft, tiny_qwen, 60), tiny_qwen.embed(make_inputs(tiny_qwen))
    logits = session.prefill(prompt, tiny_qwen.features(prompt, draft.levels), torch.tensor([5]))
    path = torch.tensor([int(prompt.input_ids[0, -1]), 5])
    torch.testing.assert_close(logits, level_logits(draft, tiny_qwen, path, session._hidden[:1])[:, ids])
    assert set(session.propose(logits, 7)[1][0].tolist()) <= set(ids.tolist())


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


class Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_pace_weighs_a_level_by_what_is_accepted_from_it_on(double: sage.Target) -> None:
    draft = block(double)
    student, teacher = student_of(draft, double, dpace_alpha=0.25)
    pairs = teacher(in_double(padded_batch(double)))
    output = student.predict(pairs, teacher.lm_head)
    from train.distill.objective import pace_weights

    rows = output.rows
    acceptance = torch.rand(len(rows.step), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with Operators() as seen:
        found = pace_weights(acceptance, rows, draft.num_levels, 0.25)  # type: ignore[arg-type]
    assert "cumsum" not in seen.names, "its kernel for floats on GPUs is refused with train.deterministic=true"
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

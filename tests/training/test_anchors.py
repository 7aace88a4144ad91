"""Drafts trained from few anchors: rows, expectation, cost, and micro-batches with few roots or none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import in_double, make_qwen, padded_batch, random_draft
from torch import Tensor

from train.config.schema import ObjectiveConfig
from train.distill import student as students
from train.distill.objective import Objective, chain_counts
from train.distill.rows import Anchors, Rows, draw_anchors, is_root_of
from train.distill.student import HeadStudent
from train.distill.teacher import Teacher
from train.monitor.metrics import expect

STEPS = 3


def student_of(kind: str, anchors: int | None, compressor: dict[str, Any] | None = None) -> tuple[HeadStudent, Teacher, Any]:
    """A random head in float64 with its teacher, and the pairs of two sequences of different lengths."""
    target = make_qwen()
    target.model.double()
    draft = random_draft(target, kind, compressor=compressor).double()
    is_eagle = kind == "eagle"
    config = ObjectiveConfig(ce_weight=1.0, feature_weight=float(is_eagle), steps=STEPS, step_decay=0.5, anchors=anchors)
    student = HeadStudent(draft.requires_grad_(True), Objective(config))
    teacher = Teacher(target, levels=student.levels)
    return student, teacher, teacher(in_double(padded_batch(target)))


def loss_and_gradients(student: HeadStudent, teacher: Teacher, pairs: Any) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    loss, sums, agreements = student(pairs, teacher.lm_head)
    return loss, list(torch.autograd.grad(loss, list(student.draft.parameters()))), sums, agreements


@pytest.mark.parametrize(("kind", "compressor"), [("eagle", None), ("eagle3", None), ("eagle", {"kind": "pool", "ratio": 2})])
def test_the_mean_over_all_draws_is_the_complete_objective(kind, compressor, monkeypatch):
    """One anchor per sequence: loss and gradient averaged over every choice of it. With enough anchors, any draw is equal."""
    student, teacher, pairs = student_of(kind, None, compressor)
    expected = loss_and_gradients(student, teacher, pairs)
    short = student.draft.shorten(pairs.embeds_next, pairs.features.last, pairs.position_ids, pairs.pair_masks)
    roots = [row.nonzero()[:, 0] for row in is_root_of(short.move_mask(pairs.mask), STEPS)]
    longest = max(map(len, roots))
    student.objective.config.anchors = 1
    total, totals = torch.zeros((), dtype=torch.float64), [torch.zeros_like(p) for p in student.draft.parameters()]
    for number in range(longest):
        drawn = torch.stack([row[number % len(row)] for row in roots])[:, None]
        # the number of roots; the shorter sequence repeats some of its roots, which then weigh less
        scale = torch.tensor([[longest / len(range(number % len(row), longest, len(row)))] for row in roots]).double()
        monkeypatch.setattr(students, "draw_anchors", always(Anchors(drawn, (1,) * STEPS, scale.expand(-1, STEPS))))
        loss, grads, *_ = loss_and_gradients(student, teacher, pairs)
        total += loss / longest
        totals = [mean + grad / longest for mean, grad in zip(totals, grads, strict=True)]
    monkeypatch.undo()
    student.objective.config.anchors = 99
    everything = loss_and_gradients(student, teacher, pairs)
    for loss, grads in ((total, totals), everything[:2]):
        torch.testing.assert_close(loss, expected[0], rtol=1e-11, atol=0)
        for mine, theirs in zip(grads, expected[1], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(everything[2], expected[2], rtol=1e-11, atol=1e-12)  # all metrics, of all first rows


def always(anchors: Anchors) -> Callable[..., Anchors]:
    return lambda *_: anchors


def test_anchors_are_drawn_among_the_roots_and_depend_on_the_generator_alone() -> None:
    mask = torch.zeros(3, 40, dtype=torch.bool)
    mask[0, 10:30], mask[1, 38:] = True, True
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(draw_anchors(is_root_of(mask, STEPS), 5, [1.0] * STEPS))
    assert torch.equal(drawn[0].root_BA, drawn[1].root_BA) and not torch.equal(drawn[0].root_BA, drawn[2].root_BA)
    for one in drawn:
        assert one.root_BA.shape == (3, 5) and one.sizes == (5, 5, 5)
        assert all(len(set(row)) == 5 for row in one.root_BA.tolist())
        assert set(one.root_BA[0].tolist()) <= set(range(8, 30)) and set(one.root_BA[1, :4].tolist()) == {36, 37, 38, 39}
        assert one.scale_BR.tolist() == [[pytest.approx(22 / 5)] * 15, [1, 1, 1, 1, 0] * 3, [0] * 15]
    fewer = [draw_anchors(is_root_of(mask, STEPS)[first:], 5, [1.0] * STEPS).root_BA.shape for first in (1, 2)]
    assert fewer == [(2, 4), (1, 1)]
    assert draw_anchors(is_root_of(mask, STEPS), None, [1.0] * STEPS).root_BA.shape == (3, 22)


def test_dropped_chains_are_replaced_by_the_factor_of_those_kept() -> None:
    """The shares 0.7 and 0.2 of ten drawn roots of 22 are kept, nested; a short answer keeps its own share."""
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask[0, 2:22], mask[1, 30:31] = True, True
    anchors = draw_anchors(is_root_of(mask, 3), 10, [1.0, 0.7, 0.2])
    assert anchors.sizes == (10, 7, 2)
    scales = anchors.scale_BR.split(anchors.sizes, 1)
    assert [one[0].sum().item() for one in scales] == pytest.approx([22, 22, 22])
    assert [one[1].tolist() for one in scales] == [[1, 1, 1] + [0] * 7, [1, 1, 1] + [0] * 4, [3, 0]]
    root_BR = anchors.per_row(anchors.root_BA)
    first, second, third = (rows[0].tolist() for rows in root_BR.split(anchors.sizes, 1))
    assert second == first[:7] and third == first[:2]
    assert anchors.step_R.tolist() == [0] * 10 + [1] * 7 + [2] * 2


@pytest.mark.parametrize(("kind", "anchors"), [("eagle", 4), ("eagle3", None)])
def test_a_micro_batch_without_roots_adds_nothing(kind: str, anchors: int | None) -> None:
    """Every parameter still has a gradient, of zeros: without one, the collectives of other ranks would wait."""
    student, teacher, pairs = student_of(kind, anchors)
    pairs.mask[:] = False
    loss, grads, sums, counts = loss_and_gradients(student, teacher, pairs)
    assert float(loss.detach()) == 0 and not sums.any() and not counts.any() and not any(grad.any() for grad in grads)


def test_chains_are_counted_and_extrapolated() -> None:
    """The example of `chain_counts`. Chains of five: 1 + c0 + c0 c1 + 3 times that to the last share's powers."""
    agree = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1]).bool()
    rows = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2)]
    step, chain = torch.tensor(rows).T
    of_chain = Rows(step, step, [1] * 8, chain, torch.ones(8), 3, step, torch.tensor(8))
    counts = chain_counts(agree, of_chain, 3)
    assert counts.tolist() == [[3, 2, 1], [2, 2, 0]]
    assert expect(counts, 5).tolist() == pytest.approx([3 * (1 + 2 / 3 + 2 / 3), 3])
    half = torch.tensor([[8.0, 4.0], [4.0, 2.0]])
    assert expect(half, 4).tolist() == [8 * (1 + 0.5 + 0.25 + 0.125 + 0.0625), 8]
    assert expect(half, 1).tolist() == [8 * 1.5, 8] and expect(torch.zeros(2, 3), 3).tolist() == [1, 1]

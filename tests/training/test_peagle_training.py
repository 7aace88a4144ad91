"""Training of a P-EAGLE head: the loss by hand, micro-batches without anchors, a run from its plan to its resumed end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.messages import refused
from support.models import in_double, make_qwen, padded_batch, random_draft
from support.train_helpers import configured, make_target, metrics, single_process, train_quickly
from torch import Tensor

import sage
from checkpoints.export.exporter import export
from checkpoints.inspect import inspect_folder
from sage.drafts.peagle import PEagleDraft
from train.config.hydra_app import compose
from train.config.schema import Config, ObjectiveConfig
from train.distill.objective import Objective
from train.distill.slots import SlotStudent
from train.distill.teacher import Teacher
from train.plan.search import plan
from train.plan.text import render

LEVELS = 3
PEAGLE = ["draft=peagle", "draft.feature_levels=[0,1,2]", "draft.block_size=3", "draft.num_layers=2", "draft.mask_token=0"]
PEAGLE += ["objective.anchors=4"]


def student_of(
    anchors: int | None, keep: tuple[float, ...] = (1, 1, 1), compressor: Any = None
) -> tuple[SlotStudent, Teacher, Any]:
    """A random head in float64 with its teacher, and pairs of two sequences whose second answer begins after a gap."""
    target = make_qwen()
    target.model.double()
    vocabulary = torch.arange(0, 330, 3)
    draft = random_draft(target, "peagle", block_size=LEVELS, num_layers=2, vocabulary=vocabulary, compressor=compressor)
    config = ObjectiveConfig(ce_weight=1.0, feature_weight=0.0, steps=LEVELS, step_decay=0.5, anchors=anchors)
    student = SlotStudent(draft.double().requires_grad_(True), Objective(config), keep)
    teacher = Teacher(target, levels=student.levels, token_map=student.token_map)
    batch = in_double(padded_batch(target))
    batch["loss_mask"][0, -3] = False
    return student, teacher, teacher(batch)


def by_hand(student: SlotStudent, teacher: Teacher, pairs: Any) -> Tensor:
    """One causal pass for each supervised pair; the loss of its levels up to the end of the turn."""
    draft, total = student.draft, torch.zeros((), dtype=torch.float64)
    fused = draft.fuse(pairs.features)
    for batch, root in pairs.mask.nonzero().tolist():
        places = torch.arange(root, root + LEVELS)[1:].clamp(max=pairs.mask.shape[1] - 1)
        slot_embeds, slot_features = draft.slots(1, LEVELS - 1)
        embeds = torch.cat((pairs.embeds_next[batch : batch + 1, : root + 1], slot_embeds), 1)
        features = torch.cat((fused[batch : batch + 1, : root + 1], slot_features), 1)
        positions = torch.cat((torch.arange(root + 1), places))
        hidden = draft(embeds, features, pairs.position_ids[:, batch : batch + 1, positions])[0, root:]
        for level, weight in enumerate((4 / 7, 2 / 7, 1 / 7)):
            if not pairs.mask[batch, root : root + level + 1].all() or root + level >= pairs.mask.shape[1]:
                break
            p = (teacher.lm_head @ pairs.features_next[batch, root + level]).softmax(-1)
            total = total - weight * p @ draft.logits(hidden[level], teacher.target).log_softmax(-1)
    return total


def test_the_loss_equals_one_pass_per_anchor() -> None:
    """Value and gradient in float64, every supervised pair an anchor and no level dropped."""
    student, teacher, pairs = student_of(None)
    parameters = list(student.draft.parameters())
    ours, expected = student(pairs, teacher.lm_head)[0], by_hand(student, teacher, pairs)
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=0)
    for mine, theirs in zip(*(torch.autograd.grad(loss, parameters) for loss in (ours, expected)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_dropped_levels_and_few_anchors_keep_the_expectation() -> None:
    """The mean of 400 draws of two anchors, of which each level keeps half, within four standard errors."""
    student, teacher, pairs = student_of(2, (1, 0.5, 0.25))
    torch.manual_seed(0)
    with torch.no_grad():
        expected = float(by_hand(student, teacher, pairs))
        losses = torch.stack([student(pairs, teacher.lm_head)[0] for _ in range(400)])
    error = float(losses.std()) / 20
    assert 0 < error < 0.05 * expected and abs(float(losses.mean()) - expected) < 4 * error


@pytest.mark.parametrize("compressor", [None, {"kind": "pool", "ratio": 2}])
def test_a_micro_batch_without_anchors_adds_nothing(compressor: Any) -> None:
    """Every parameter still has a gradient, of zeros."""
    student, teacher, pairs = student_of(4, (1, 0.7, 0.49), compressor)
    assert float(student(pairs, teacher.lm_head)[1][-1]) == int(pairs.mask.sum())
    pairs.mask[:] = False
    loss, sums, counts = student(pairs, teacher.lm_head)
    grads = torch.autograd.grad(loss, list(student.draft.parameters()))
    assert not any(value.any() for value in (loss.detach(), sums, counts, *grads))


@pytest.mark.slow
def test_it_trains_resumes_and_is_loaded_inspected_and_exported_as_peagle_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps are three and three more, bit for bit, with random anchors and dropped levels."""
    path = make_target(tmp_path)
    with single_process(monkeypatch):
        for folder, lengths in (("straight", (6,)), ("resumed", (3, 6))):
            for steps in lengths:
                given = ["train.save_every=3", f"train.max_steps={steps}", f"run.resume={steps > lengths[0]}"]
                assert train_quickly(configured(path, tmp_path / folder, *PEAGLE, *given)) == 0
    straight, resumed = (load_file(tmp_path / name / "draft" / "model.safetensors") for name in ("straight", "resumed"))
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())
    losses = [line["loss"] for line in metrics(tmp_path / "straight")]
    assert losses[-1] < losses[0]
    target = sage.load_target(path, dtype=torch.float32)
    draft = sage.load_draft(tmp_path / "straight", target)
    assert isinstance(draft, PEagleDraft) and (draft.num_levels, draft.num_layers) == (3, 2)
    sizes = {"block_size": 3, "num_layers": 2, "feature_levels": [0, 1, 2], "mask_token": 0}
    fresh = sage.new_draft(target, "peagle", seed=0, **sizes).state_dict()
    assert all(torch.equal(value, fresh[name]) == (name in ("d2t", "t2d")) for name, value in straight.items())
    assert inspect_folder(tmp_path / "straight" / "draft").facts["architecture"] == "sage_peagle"
    with refused("draft=peagle; its formats: peagle"):
        export(tmp_path / "straight" / "draft", tmp_path / "out", "eagle3")


def test_it_is_planned() -> None:
    """Fewer parameters than EAGLE-3's head by its masks alone; its single pass takes less than seven unrolled steps."""
    arguments = ["launch.plan=true", "target=qwen2_5_vl_7b", "launch.gpus=8"]
    ours, eagle3 = (plan(compose("config", [*arguments, f"draft={kind}"], Config)) for kind in ("peagle", "eagle3"))
    assert ours.models.draft_parameters == eagle3.models.draft_parameters + 4 * 3584
    assert 0 < ours.flops["draft"] < eagle3.flops["draft"] / 2
    assert "can be served by vLLM (sage-export --format peagle" in render(ours)

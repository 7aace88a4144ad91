"""A training step on the pretend accelerator: nothing on another device, no blocking copy, no synchronization per chunk."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.accelerator import DEVICE, Kind, Traffic, on_device, on_host
from support.data_helpers import make_student
from support.models import MAKERS, make_qwen, padded_batch

import sage
from sage.runtime import attention
from sage.runtime.modes import VisionAttention
from sage.targets.loading import set_attention
from train.config.schema import OptimConfig
from train.distill.student import Student
from train.distill.teacher import Pairs, Staging, Teacher, count_supervised
from train.job.loop import train_step
from train.launch.supervisor import StopFlag
from train.monitor.metrics import TrainingMetrics
from train.state.resume import TrainState

KINDS = ["eagle", "eagle3", "model"]


def teach(target: sage.Target, student: Student, batch: dict[str, Any]) -> tuple[Teacher, Pairs]:
    teacher = Teacher(target, "embed", student.levels, student.token_map)
    return teacher, teacher(Staging(target, target.device, target.dtype)(batch))


def step(student: Student, teacher: Teacher, pairs: Pairs, count: int) -> torch.Tensor:
    """One step of the optimizer without DeepSpeed; returns the loss. With this `eps` a step is smooth in the gradient."""
    optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr=1e-3, eps=1e-2, foreach=False)
    loss = student(pairs, teacher.lm_head)[0] / count
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize(("family", "kind"), [*(("qwen2_5_vl", kind) for kind in KINDS), ("llava_onevision", "eagle")])
def test_a_step_on_the_device_equals_one_on_the_cpu(family: str, kind: str, traffic: Traffic) -> None:
    results = []
    for is_device in (False, True):
        target = MAKERS[family]()
        student, batch = make_student(target, kind), padded_batch(target)
        if is_device:
            on_device(target)
            student = on_device(student)
        teacher, pairs = teach(target, student, batch)
        loss = step(student, teacher, pairs, int(count_supervised(batch["loss_mask"])))
        results.append((on_host(loss), on_host(dict(student.draft.named_parameters()))))
    (loss, weights), (device_loss, device_weights) = results
    torch.testing.assert_close(device_loss, loss, rtol=1e-5, atol=0)
    for name, value in weights.items():
        torch.testing.assert_close(device_weights[name], value, rtol=0, atol=1e-6, msg=name)


def test_batches_are_copied_once_without_blocking(traffic: Traffic) -> None:
    target = on_device(make_qwen())
    student = on_device(make_student(target, "model"))
    batch = padded_batch(target)
    num_tensors = sum(isinstance(value, torch.Tensor) for value in batch.values())
    traffic.reset()
    teacher, pairs = teach(target, student, batch)
    student(pairs, teacher.lm_head)
    copies = {line: number for (kind, line), number in traffic.lines.items() if kind is Kind.UPLOAD}
    assert sum(copies.values()) == num_tensors + 2 + 4  # with the rope positions and the layout of the vision tower's input
    blocking = {line for kind, line in traffic.lines if kind is Kind.BLOCKING_UPLOAD}
    assert {line.split(":")[0] for line in blocking} <= {"sage/targets/families/qwen2_5_vl.py"}  # Hugging Face's vision tower


class PlainEngine:
    """As `Engine` without DeepSpeed, on one rank."""

    def __init__(self, student: Student) -> None:
        self.student = student
        self.optimizer = torch.optim.SGD([p for p in student.parameters() if p.requires_grad], foreach=False)

    def __call__(self, pairs: Pairs, lm_head: torch.Tensor) -> Any:
        return self.student(pairs, lm_head)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        loss.backward()

    def take_bad_gradient(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.bool, device=DEVICE)

    def step(self, lr: float) -> float:
        self.optimizer.step()
        return 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_known_reasons_only(kind: str, traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each micro-batch: placeholders that are counted, the number of roots for heads, and the rows of the objective, of
    which no chunk waits. The vision tower has its layout from `Staging`, except in a draft model, which embeds its own inputs.
    """
    monkeypatch.setattr(attention, "varlen_attn", lambda query, *_: query.clone())
    target = on_device(make_qwen())
    set_attention(target.model, VisionAttention.varlen)
    student = on_device(make_student(target, kind, chunk_tokens=1))
    staging = Staging(target, target.device, target.dtype)
    run: Any = SimpleNamespace(
        teacher=Teacher(target, "embed", student.levels, student.token_map),
        engine=PlainEngine(student),
        metrics=TrainingMetrics(None),
        ranks=SimpleNamespace(sum=lambda values: values.detach().cpu().double(), device=DEVICE, world_size=1),
        config=SimpleNamespace(optim=OptimConfig(lr=1e-3, grad_clip=1.0)),
        expected_steps=4,
        state=TrainState(),
        stop=StopFlag(),
        is_stopping=False,
        own_answers=None,
        figures={},
    )
    embeds = 2 if kind == "model" else 1  # a draft model embeds its own inputs
    for num_batches in (1, 3):
        batches = [staging(padded_batch(target)) for _ in range(num_batches)]
        traffic.reset()
        train_step(run, batches)
        waits = Counter[str]()
        for (event, line), number in traffic.lines.items():
            if event is Kind.SYNCHRONIZATION:
                waits[line.split(":")[0]] += number
        assert bool(waits.pop("sage/targets/families/qwen2_5_vl.py", 0)) == (kind == "model"), "Hugging Face's vision tower"
        assert waits == {
            "sage/targets/family.py": embeds * num_batches,
            "train/distill/rows.py": (3 if kind == "model" else 4) * num_batches,
            "tests/training/test_device_step.py": 1,  # the flag of bad gradients
        }

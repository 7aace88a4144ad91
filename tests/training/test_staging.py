"""Preparation of micro-batches in the loader's thread: rope positions, dtype of pixels, pinned memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.data_helpers import Numbers, collate_numbers
from support.fake_cuda import FakeCuda
from support.models import padded_batch
from torch import Tensor

import sage
from data_prep.batching.loader import StepLoader
from sage.targets.family import NEXT_POSITION, POSITIONS
from train.distill.staging import Staging

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def test_embedding_uses_the_staged_positions(tiny_target: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = padded_batch(tiny_target)
    plain = tiny_target.embed(batch)
    staged = Staging(tiny_target, CPU, torch.float32)(batch)
    monkeypatch.setattr(type(tiny_target.family), "positions", lambda *_: pytest.fail("computed twice"))
    found = tiny_target.embed(staged)
    assert torch.equal(found.position_ids, plain.position_ids) and torch.equal(found.next_position, plain.next_position)
    assert torch.equal(found.embeds, plain.embeds)
    assert POSITIONS not in found.inputs and NEXT_POSITION not in found.inputs


def test_pixels_are_converted_before_they_are_copied(tiny_target: sage.Target) -> None:
    """Nothing is lost: the vision tower converts them to its own dtype first."""
    target = tiny_target
    target.model.bfloat16()
    batch = padded_batch(target) | {"second_per_grid_ts": torch.tensor([0.4375, 1 / 3])}
    staged = Staging(target, CPU, torch.bfloat16)(batch)
    assert staged["pixel_values"].dtype == torch.bfloat16
    assert staged["second_per_grid_ts"].dtype == torch.float32, "rope positions are computed from them"
    expected, found = (target.family.visual_features(target.model, inputs) for inputs in (batch, staged))
    assert all(torch.equal(found[key].embeds, value.embeds) for key, value in expected.items())


def test_batches_for_a_gpu_are_pinned_in_the_context_of_that_gpu(
    tiny_qwen: sage.Target, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = list[int]()
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(id(self)) or self)
    staged = Staging(tiny_qwen, GPU, torch.float32)(padded_batch(tiny_qwen))
    assert sorted(pinned) == sorted(id(value) for value in staged.values() if isinstance(value, Tensor))
    assert fake_cuda.calls == [("set_device", GPU)]  # of the calling thread
    assert staged["ids"] == ["a", "b"]


def test_the_loader_stages_in_its_own_thread() -> None:
    threads = list[str]()

    def stage(batch: dict[str, Any]) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return batch | {"is_staged": True}

    loader = StepLoader(Numbers(4), collate_numbers, 2, 1, stage=stage)
    steps = iter(loader)
    assert all(batch["is_staged"] for batch in next(steps))
    steps.close()
    assert set(threads) == {"step-loader_0"}

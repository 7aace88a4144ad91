"""Decoding on GPUs, tested without one: devices, streams, attention backends, dtypes of buffers. See docs/gpu.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fake_cuda import FakeCuda, fake_cuda
from support.models import make_qwen

import sage
from sage.cli import resolve_device
from sage.costs.timing import Clock
from sage.drafts.model import shallow_model
from train.launch.ranks import pick_device

__all__ = ["fake_cuda"]


def test_clock_of_a_second_gpu_uses_its_stream(fake_cuda: FakeCuda) -> None:
    device = torch.device("cuda:1")
    clock = Clock(device)
    clock.lap("verify")
    assert clock.seconds()["verify"] == 1e-3
    assert fake_cuda.calls == [("record", ("stream", device))] * 2 + [("synchronize", device)]


def test_commands_make_their_gpu_the_current_device(fake_cuda: FakeCuda) -> None:
    assert resolve_device("cuda:2") == torch.device("cuda:2")
    assert resolve_device("auto") == torch.device("cuda:0")
    assert pick_device("auto", 3) == torch.device("cuda:3")
    assert fake_cuda.calls == [
        ("set_device", torch.device("cuda:2")),
        ("set_device", torch.device("cuda:0")),
        ("set_device", 3),
    ]
    assert resolve_device("cpu") == pick_device("cpu", 3) == torch.device("cpu")
    assert len(fake_cuda.calls) == 3


def test_cudnn_attention_is_off_for_a_target_on_a_gpu(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_qwen()
    assert fake_cuda.calls == []
    monkeypatch.setattr(sage.Target, "device", torch.device("cuda:0"))
    sage.Target(target.model)
    assert fake_cuda.calls == [("enable_cudnn_sdp", False)]


def test_a_shallow_model_keeps_the_rope_of_its_target(tiny_target: sage.Target) -> None:
    """Rounded to bfloat16, the angle of position 4000 is off by several radians."""
    target = sage.Target(_cast_parameters(tiny_target.model, torch.bfloat16))
    model = shallow_model(target, 1).model.model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    own, theirs = dict(model.named_buffers()), dict(target.model.named_buffers())
    assert own.keys() == theirs.keys() and any("inv_freq" in name for name in own)
    for name, buffer in own.items():
        assert buffer.dtype == theirs[name].dtype and torch.equal(buffer, theirs[name]), name


def _cast_parameters(model: Any, dtype: torch.dtype) -> Any:
    """As `from_pretrained` does: rope frequencies stay in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def test_a_seed_draws_weights_beside_several_gpus(fake_cuda: FakeCuda) -> None:
    """`fork_rng` warns, which is an error here, if it has to save the generators of several GPUs."""
    target = make_qwen()
    state = torch.random.get_rng_state()
    first, second = (sage.new_draft(target, "eagle", seed=3) for _ in range(2))
    assert torch.equal(first.fc.weight, second.fc.weight)
    assert torch.equal(state, torch.random.get_rng_state())

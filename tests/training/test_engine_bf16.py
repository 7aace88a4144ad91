"""The engine on one rank: parameters without a gradient in bf16, and the optimizer of a run on GPUs."""

from __future__ import annotations

import pytest
import torch
from support.models import make_qwen

import sage
from train.config.hydra_app import compose
from train.config.schema import Config
from train.distill.build import new_student
from train.engine.engine import Engine, make_optimizer
from train.launch.ranks import process_group

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_offloaded_adamw_is_fused_on_gpus(offload: str) -> None:
    """Its parameters are then float32 tensors on the CPU, for which torch has a fused step as well."""
    config: Config = compose("config", [f"deepspeed.offload_optimizer={offload}", "optim.lr=1e-2"], Config)
    weights = [torch.nn.Linear(8, 8, bias=False) for _ in range(2)]
    for weight, device in zip(weights, ("cuda", "cpu"), strict=True):
        torch.nn.init.ones_(weight.weight)
        optimizer = make_optimizer(weight, config, torch.device(device))
        assert optimizer.defaults["fused"] is (device == "cuda")
        (weight.weight**2).sum().backward()
        optimizer.step()
    torch.testing.assert_close(weights[0].weight, weights[1].weight)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_without_a_gradient_counts_as_zero(stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As on a rank whose micro-batch has no image. Were it left out there alone, the ranks would clip to different norms."""
    settings = [f"deepspeed=zero{stage}", "target.dtype=bf16", "launch.device=cpu", "draft=eagle", "optim.grad_clip=1"]
    config: Config = compose("config", settings, Config)
    student = new_student(sage.new_draft(make_qwen(), "eagle", seed=0), config)
    with process_group("cpu", 60) as ranks:
        engine = Engine(student, config, ranks, 2)
        printed = capsys.readouterr().out
        for is_last in (False, True):
            weight = dict(engine.draft.named_parameters())["fc.weight"]
            engine.backward((weight.float() ** 2).sum(), is_last)
        expected = 2 * 2 * weight.detach().double().norm()
        counted = [flag for group in getattr(engine._optimizer, "fp32_groups_has_gradients", ()) for flag in group]
        norm = engine.step(1e-3)
        moments = dict(engine._state.read("exp_avg"))
        engine.close()
    assert "bf16_optimizer" not in printed
    assert norm == pytest.approx(float(expected), rel=0.01)  # bf16
    assert len(counted) == (len(moments) if stage < 2 else 0) and all(counted)
    assert {name for name, value in moments.items() if value.any()} == {"fc.weight"}

"""The optimizers on one rank: Muon (of parts of matrices: test_ranks), AdamW of offloaded states, gradients in bf16."""

from typing import Any

import pytest
import torch
from support.models import make_qwen

import sage
from train.config.hydra_app import compose
from train.config.schema import Config
from train.distill.build import new_student
from train.engine.engine import Engine, make_optimizer
from train.engine.optimizers import Muon, matrices_of, orthogonalized
from train.launch.ranks import process_group

LR = 1e-2


def new_optimizer(module: torch.nn.Module, *settings: str) -> Any:
    config = compose("config", ["optim=muon", f"optim.lr={LR}", *settings], Config)
    return make_optimizer(module, config, torch.device("cpu"))


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_singular_values_become_ones(shape: tuple[int, int]) -> None:
    """Against the iteration of each singular value in float64; the directions stay."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, expected, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    expected = expected / expected.norm()
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    found = left.T @ orthogonalized(matrix).double() @ right.T
    values = found.diagonal()
    torch.testing.assert_close(values, expected, rtol=1e-3, atol=0)
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    assert float((found - values.diag()).abs().max()) < 1e-4
    assert not orthogonalized(torch.zeros(shape)).any()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_those_of_torch(weight_decay: float) -> None:
    """`torch.optim.Muon` for the matrices, which iterates in bfloat16, and AdamW for the rest."""
    ours, theirs = (torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 24)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    start = {name: weight.clone() for name, weight in ours.state_dict().items()}
    optimizer = new_optimizer(ours, f"optim.weight_decay={weight_decay}")
    matrices, vectors = ([p for p in theirs.parameters() if p.ndim == ndim] for ndim in (2, 1))
    options: dict[str, Any] = {"lr": LR, "weight_decay": weight_decay}
    references = [
        torch.optim.Muon(matrices, momentum=0.95, adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW(vectors, betas=(0.9, 0.95), **options),
    ]
    inputs = torch.randn(3, 64, 12, generator=torch.Generator().manual_seed(1))
    for step, values in enumerate(inputs):
        for module, optimizers in ((ours, [optimizer]), (theirs, references)):
            module.zero_grad()
            (module(values) ** 2).sum().backward()
            kept = [p.grad for p in module.parameters()]
            for one in optimizers:
                one.step()
            assert all(p.grad is gradient for p, gradient in zip(module.parameters(), kept, strict=True)), step
    for name, weight in ours.state_dict().items():
        moved, expected = weight - start[name], theirs.state_dict()[name] - start[name]
        error = float((moved - expected).norm() / expected.norm())
        assert error < (0.12 if weight.ndim == 2 else 0.001), name  # bfloat16 inflates small singular values
        assert float(moved.norm()) > 0, name


def test_matrices_are_weights_of_linear_layers_except_those_of_tokens() -> None:
    draft: Any = sage.new_draft(make_qwen(), "eagle3", feature_levels=[1, 2, 3], seed=0)
    names = {id(p): name for name, p in draft.named_parameters()}
    found = {names[id(matrix)] for matrix in matrices_of(draft)}
    assert "fc.weight" in found and any(name.endswith("down_proj.weight") for name in found)
    assert "lm_head.weight" in names.values() and not any("lm_head" in name or "norm" in name for name in found)


def test_a_tensor_without_a_gradient_is_left_alone() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = new_optimizer(module, "optim.weight_decay=0.1")
    assert isinstance(optimizer, Muon)
    before = module[1].weight.clone()
    module[0](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert torch.equal(module[1].weight, before) and module[1].weight not in optimizer.state


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_offloaded_adamw_is_fused_on_gpus(offload: str) -> None:
    """Its parameters are then float32 tensors on the CPU, for which torch has a fused step as well."""
    config = compose("config", [f"deepspeed.offload_optimizer={offload}", "optim.lr=1e-2"], Config)
    weights = [torch.nn.Linear(8, 8, bias=False) for _ in range(2)]
    for weight, device in zip(weights, ("cuda", "cpu"), strict=True):
        torch.nn.init.ones_(weight.weight)
        optimizer = make_optimizer(weight, config, torch.device(device))
        assert optimizer.defaults["fused"] is (device == "cuda")
        (weight.weight**2).sum().backward()
        optimizer.step()
    torch.testing.assert_close(weights[0].weight, weights[1].weight)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_without_a_gradient_counts_as_zero(stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As on a rank whose micro-batch has no image. Were it left out there alone, the ranks would clip to different norms."""
    settings = [f"deepspeed=zero{stage}", "target.dtype=bf16", "launch.device=cpu", "draft=eagle", "optim.grad_clip=1"]
    config = compose("config", settings, Config)
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
        moments = dict(engine.optimizer_state.read("exp_avg"))
        engine.close()
    assert "bf16_optimizer" not in printed
    assert norm == pytest.approx(float(expected), rel=0.01)  # bf16
    assert len(counted) == (len(moments) if stage < 2 else 0) and all(counted)
    assert {name for name, value in moments.items() if value.any()} == {"fc.weight"}

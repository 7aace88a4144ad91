"""The kernel of linear layers for few rows, against sums in float64; which layers run with it; layers of prompts."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sage.runtime import joint_linear as kernels
from sage.runtime import linear_layers, prompt_linear
from sage.runtime.joint_linear import DTYPES, JOINT_LINEAR, joint_linear

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}  # of a sum, relative to the sum of the magnitudes of its terms


@pytest.fixture(scope="module", params=["this processor", "AVX2", "no vectors"])
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernel as it is built here, on a processor with AVX2 only, and on an unknown one."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if request.param != "this processor":
            if platform.machine() not in ("x86_64", "AMD64"):
                pytest.skip("the options are for x86")
            replaced = (
                {"-march=native": "-mno-avx", "-O3": "-O1"} if request.param == "no vectors" else {"-march=native": "-mavx2"}
            )
            flags = [replaced.get(flag, flag) for flag in kernels.FLAGS]
            monkeypatch.setattr(kernels, "FLAGS", (*flags, "-mfma") if request.param == "AVX2" else tuple(flags))
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
            monkeypatch.setattr(kernels, "kernel", cache(kernels.kernel.__wrapped__))
        yield


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("depth", [5, 64, 83])
def test_against_float64(dtype: torch.dtype, depth: int) -> None:
    """Every group of rows, remainders of rows, columns and depth, several weights, two threads; NaN and infinity stay."""
    torch.manual_seed(0)
    weights = [torch.randn(size, depth).to(dtype) for size in (50, 1, 29)]
    joined = torch.cat(weights).double()
    for rows in (*range(1, 10), 16, 17, 30, 40, 70):
        x = torch.randn(2, rows, depth)[:1].to(dtype)
        expected, scale = x.double() @ joined.T, x.double().abs() @ joined.abs().T
        for threads in (1, 2):
            found = joint_linear(x, weights, threads)
            assert found.dtype == dtype and found.shape == (1, rows, 80)
            assert ((found.double() - expected).abs() <= ROUNDING[dtype] * scale).all()
    x[0, 0, 0], x[0, 1, -1] = torch.nan, torch.inf
    found = joint_linear(x, weights, 1)
    assert found[0, 0].isnan().all() and found[0, 1].isinf().all() and found[0, 2:].isfinite().all()


class Block(nn.Module):
    """Layers of one input, with and without bias, the joined ones of a draft, and one of another input."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(8, 6), nn.Linear(8, 4, bias=False), nn.Linear(10, 8)
        self.joined = nn.ModuleList(nn.Linear(8, 5, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.out(torch.cat((self.query(x), self.key(x)), -1))
        return hidden.sum() + torch.cat([layer(hidden) for layer in self.joined], -1)


@pytest.mark.parametrize(("seconds", "num_calls"), [((1.0, 2.0), 3), ((2.0, 1.0), 0)])
def test_the_faster_kernel_is_chosen(seconds: tuple[float, float], num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layers, "timings", lambda *_: seconds)
    monkeypatch.setattr(nn.functional, "linear", torch._C._nn.linear)  # DeepSpeed replaces it under ZeRO-3
    block, x = Block(), torch.randn(3, 8)
    with torch.no_grad():
        program = torch.export.export(block, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=64)},))
        text = linear_layers.choose(program, (2, 5))
        nodes = list(program.graph_module.graph.nodes)
        assert [node.target for node in nodes].count(JOINT_LINEAR) == num_calls
        assert [node.target for node in nodes].count(linear_layers.CAT) == (1 if num_calls else 2)
        assert f"run by {'joint_linear' if num_calls else 'torch'}, in place" in text and "2, 5 row(s)" in text
        for rows in (3, 7):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(program.module()(x), block(x))


def test_only_large_weights_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layers, "MIN_BYTES", 4 * 64)
    assert linear_layers.kernel_facts(nn.Linear(8, 8)) and not linear_layers.kernel_facts(nn.Linear(8, 7))
    assert not linear_layers.kernel_facts(nn.Linear(64, 64).double())
    assert not linear_layers.kernel_facts(nn.Linear(64, 64, device="meta"))


def test_a_kernel_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line; the linear layers are torch's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "FLAGS", ("--no-such-option",))
    monkeypatch.setattr(linear_layers, "kernel", kernels.kernel.__wrapped__)
    with pytest.warns(UserWarning, match="passes: the kernel of linear layers cannot be built .*torch's is used") as caught:
        for _ in range(2):
            assert linear_layers.kernel_facts(nn.Linear(1000, 1000)) is None
    assert len(caught) == 1


class TestPrompts:
    @pytest.fixture(autouse=True)
    def measurements(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
        """Counts measurements, which find other kernels than torch's faster for layers with 8 inputs."""
        calls: list[Any] = []

        def measured(layers: Any) -> list[list[str]]:
            calls.append(layers)
            return [["joint_linear", "onednn"] if layer.in_features == 8 else ["torch"] * 2 for layer in layers]

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(prompt_linear, "MIN_BYTES", 0)
        monkeypatch.setattr(prompt_linear, "measured", measured)
        monkeypatch.setattr(prompt_linear, "_CHOICES", {})
        return calls

    def test_the_fastest_kernels_inside_the_block(self, measurements: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        used: list[str] = []
        for name, run in list(prompt_linear.KERNELS.items()):
            monkeypatch.setitem(prompt_linear.KERNELS, name, lambda *args, name=name, run=run: used.append(name) or run(*args))
        with torch.no_grad():
            for rows, expected in ((64, "joint_linear"), (65, "onednn")):
                block, x = Block(), torch.randn(rows, 8)
                with prompt_linear.fast_prompts(block, True):
                    found = block(x)
                torch.testing.assert_close(found, block(x))
                assert used == [expected] * 4 and not any("forward" in vars(layer) for layer in block.modules())
                used.clear()
                monkeypatch.setattr(prompt_linear, "_CHOICES", {})  # the next block reads the choice from disk
        assert len(measurements) == 1

    def test_torch_with_gradients_in_other_dtypes_and_in_other_modes(self, measurements: list[Any]) -> None:
        block = Block()
        with prompt_linear.fast_prompts(block, True):
            assert "forward" not in vars(block.key)
        with torch.no_grad(), prompt_linear.fast_prompts(block, False):
            assert "forward" not in vars(block.key)
        with torch.no_grad(), prompt_linear.fast_prompts(block.double(), True):
            assert "forward" not in vars(block.key)
        assert not measurements


@pytest.mark.parametrize("dtype", DTYPES)
def test_measurement_of_prompts(dtype: torch.dtype) -> None:
    layers = [nn.Linear(8, 4, dtype=dtype), nn.Linear(16, 4, dtype=dtype)]
    names = set(prompt_linear.KERNELS)
    assert [set(choice) <= names and len(choice) for choice in prompt_linear.measured(layers)] == [2, 2]

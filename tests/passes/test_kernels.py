"""The kernels for few rows, against float64; in the graph of a pass; in prompts."""

import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from support.pass_helpers import slow_except
from torch import Tensor, nn

from sage.runtime.cache import tile_mask
from sage.runtime.cpu import graph, kernels
from sage.runtime.cpu.kernels import (
    DTYPES,
    FEW_ROWS,
    FOLDED_ATTENTION,
    JOINT_LINEAR,
    fast_prompts,
    folded_attention,
    joint_linear,
)

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}  # of a sum, relative to the sum of the magnitudes of its terms


@pytest.fixture(scope="module", params=slow_except(("this processor",), ("this processor", "AVX2", "no vectors")))
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernels as they are built here, on a processor with AVX2 only, and on an unknown one."""
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
            own = cache(kernels.kernels.__wrapped__)
            monkeypatch.setattr(kernels, "kernels", own)
        yield


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("depth", [5, 83, 300, 4101])
def test_linear_layers_against_float64(dtype: torch.dtype, depth: int) -> None:
    """Every group of rows, remainders of rows, columns and depth, several weights, two threads; NaN and infinity stay."""
    torch.manual_seed(0)
    weights = [torch.randn(size, depth).to(dtype) for size in (50, 1, 29)]
    joined = torch.cat(weights).double()
    for rows in (*range(1, 10), 16, 17, 30, 42, 70):
        x = torch.randn(2, rows, depth)[:1].to(dtype)
        expected, scale = x.double() @ joined.T, x.double().abs() @ joined.abs().T
        for threads in (1, 2):
            found = joint_linear(x, weights, threads)
            assert found.dtype == dtype and found.shape == (1, rows, 80)
            assert ((found.double() - expected).abs() <= ROUNDING[dtype] * scale).all()
    x[0, 0, 0], x[0, 1, -1] = torch.nan, torch.inf
    found = joint_linear(x, weights, 1)
    assert found[0, 0].isnan().all() and found[0, 1].isinf().all() and found[0, 2:].isfinite().all()


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("heads", "group", "size"), [(1, 1, 16), (2, 3, 32), (3, 2, 112)])
def test_attention_against_float64(dtype: torch.dtype, heads: int, group: int, size: int) -> None:
    """One node and trees, with and without a mask, few and many keys in a buffer, two requests, one to seven threads."""
    torch.manual_seed(0)
    for nodes, keys, batch in ((1, 1, 1), (1, 7, 2), (1, 90, 1), (5, 16, 1), (8, 45, 2), (40, 133, 1)):
        query = torch.randn(batch, heads, group * nodes, size).to(dtype)
        buffers = torch.randn(2, batch, heads, keys + 3, size).to(dtype)
        buffers[..., keys:, :] = torch.nan  # rows behind the keys
        key, value = buffers[0][:, :, :keys], buffers[1][:, :, :keys]
        visible = torch.rand(batch, nodes, keys) < 0.7
        visible[..., 0] = True
        for mask in (None, tile_mask(visible, group, dtype), tile_mask(visible[0], group, dtype)):
            scores = 0.3 * query.double() @ key.double().transpose(2, 3) + (0 if mask is None else mask.double())
            expected = scores.softmax(-1) @ value.double()
            for threads in (1, 2, 7):
                found = folded_attention(query, key, value, mask, 0.3, threads)
                assert found.dtype == dtype and found.shape == query.shape
                assert ((found.double() - expected).abs() <= 8 * ROUNDING[dtype] * (1 + expected.abs())).all()


@pytest.mark.usefixtures("build")
def test_attention_with_nan_and_large_scores() -> None:
    query, key, value = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    query[0, 0, 1] = torch.nan
    query[0, 1, 2] *= 1e4
    found = folded_attention(query, key, value, None, 1.0, 1)
    assert found[0, 0, 1].isnan().all() and found.isnan().sum() == 16
    best = (query[0, 1, 2] @ key[0, 1].T).argmax()
    torch.testing.assert_close(found[0, 1, 2], value[0, 1, best])


class Block(nn.Module):
    """Layers of one input, with and without bias, the joined ones of a draft, and one of another input."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(8, 6), nn.Linear(8, 4, bias=False), nn.Linear(10, 8)
        self.joined = nn.ModuleList(nn.Linear(8, 5, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.out(torch.cat((self.query(x), self.key(x)), -1))
        return hidden.sum() + torch.cat([layer(hidden) for layer in self.joined], -1)


def test_linear_layers_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.functional, "linear", torch._C._nn.linear)  # DeepSpeed replaces it under ZeRO-3
    block, x = Block(), torch.randn(3, 8)
    with torch.no_grad():
        program = torch.export.export(block, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=64)},))
        graph.use_kernels(program)
        nodes = [node.target for node in program.graph_module.graph.nodes]
        assert nodes.count(JOINT_LINEAR) == 3 and nodes.count(graph.CAT) == 1
        for rows in (3, 7):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(program.module()(x), block(x))


class Attention(nn.Module):
    """Attention of a tree to a buffer: folded heads with and without a mask, and one that the kernel does not compute."""

    def forward(self, query: Tensor, buffer: Tensor, mask: Tensor) -> list[Tensor]:
        attend, keys = nn.functional.scaled_dot_product_attention, buffer.narrow(2, 0, mask.shape[3])
        folded = query.reshape(1, 2, -1, 16)
        calls = [attend(folded, keys, keys, attn_mask=given, scale=0.5) for given in (mask, None, mask > 0)]
        return [*calls, attend(query, buffer, buffer, enable_gqa=True)]


def test_attention_of_a_graph() -> None:
    module = Attention()
    nodes, keys, capacity = (torch.export.Dim(name, min=2, max=64) for name in ("nodes", "keys", "capacity"))

    def given(nodes: int, keys: int) -> tuple[Tensor, ...]:
        return torch.randn(1, 4, nodes, 16), torch.randn(1, 2, 64, 16), torch.randn(1, 1, 2 * nodes, keys)

    with torch.no_grad():
        dims = ({2: nodes}, {2: capacity}, {2: 2 * nodes, 3: keys})
        program = torch.export.export(module, given(3, 6), dynamic_shapes=dims)
        graph.use_kernels(program)
        assert [node.target for node in program.graph_module.graph.nodes].count(FOLDED_ATTENTION) == 2
        x = given(4, 8)
        torch.testing.assert_close(program.module()(*x), module(*x))


def test_only_large_weights_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MIN_BYTES", 4 * 64)
    assert kernels.has_kernels(nn.Linear(8, 8)) and not kernels.has_kernels(nn.Linear(8, 7))
    assert not kernels.has_kernels(nn.Linear(64, 64).double())
    assert not kernels.has_kernels(nn.Linear(64, 64, device="meta"))


def test_a_kernel_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line; the linear layers are torch's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "FLAGS", ("--no-such-option",))
    monkeypatch.setattr(kernels, "kernels", kernels.kernels.__wrapped__)
    with pytest.warns(UserWarning, match="passes: the kernels for few rows cannot be built .*torch's are used") as caught:
        for _ in range(2):
            assert kernels.has_kernels(nn.Linear(1000, 1000)) is False
    assert len(caught) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_layers_of_prompts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows run with `joint_linear`; many give the same; with gradients, layers are torch's."""
    monkeypatch.setattr(kernels, "MIN_BYTES", 0)
    rows: list[int] = []
    monkeypatch.setattr(kernels, "joint_linear", lambda x, *args: rows.append(len(x)) or joint_linear(x, *args))
    torch.manual_seed(0)
    block, precision = Block().to(dtype), torch.finfo(dtype).eps
    for count, is_few in ((1, True), (FEW_ROWS, True), (FEW_ROWS + 1, False)):
        x = torch.randn(count, 8, dtype=dtype)
        with torch.no_grad(), fast_prompts(block, True):
            found = block(x)
        torch.testing.assert_close(found, block(x), rtol=max(2 * precision, 1.3e-6), atol=max(precision, 1e-5))
        assert rows == [count] * 5 * is_few and not any("forward" in vars(layer) for layer in block.modules())
        rows.clear()
    with fast_prompts(block, True):
        assert block(x[:3]).requires_grad and not rows

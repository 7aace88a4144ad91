"""Attention to the keys before a tree and to its own rows, merged: equal to one masked softmax in float64."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.fake_cuda import use_gpu_kernels
from torch import Tensor

from sage.runtime import prefix_attention
from sage.runtime.prefix_attention import attend_in_parts, key_parts, merge, softmax_attention

EXACT = {"rtol": 0, "atol": 1e-13}
HEADS, GROUP, SIZE, CAPACITY = 2, 3, 8, 64
MIN_BLOCK = 8  # keys: eight blocks of a full cache, some of them empty


def reference(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """One masked softmax over all keys; query [.., M, d], visible [M, S]."""
    scores = (query @ key.transpose(-1, -2)).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("before", [0, 1, 5, 9])
def test_a_merge_is_one_softmax(before: int) -> None:
    """Also where one of the sets is empty for some queries or for all, whatever sign its log-sum-exp has."""
    torch.manual_seed(before)
    query, key, value = (torch.randn(2, count, SIZE, dtype=torch.double) for count in (5, 9, 9))
    visible = torch.rand(5, 9) < 0.5
    visible[:, 0] |= ~visible.any(1)
    mask = torch.zeros(5, 9, dtype=torch.double).masked_fill(~visible, -torch.inf)
    one = softmax_attention(query, key[:, :before], value[:, :before], mask[:, :before], 1.0)
    other = softmax_attention(query, key[:, before:], value[:, before:], mask[:, before:], 1.0)
    expected = reference(query, key, value, visible)
    for sign in (-1, 1):
        out, lse = (torch.stack(both) for both in zip(one, other, strict=True))
        torch.testing.assert_close(merge(out, lse.masked_fill(lse.isinf(), sign * torch.inf)), expected, **EXACT)
    nothing = softmax_attention(query, key[:, :0], value[:, :0], mask[:, :0], 1.0)
    assert torch.equal(merge(*(both.expand(2, *both.shape) for both in nothing)), torch.zeros_like(query))


@pytest.mark.parametrize("before", [0, 3, 17, 50])
@pytest.mark.parametrize("window", [None, 1, 4, 11, 40])
@pytest.mark.parametrize(("nodes", "has_kernels"), [(1, True), (6, False), (6, True)])
def test_a_pass_in_parts_is_a_masked_pass(before, window, nodes, has_kernels, monkeypatch):
    """A tree after `before` tokens, with two padding nodes and one padding row."""
    if has_kernels:
        use_gpu_kernels(monkeypatch, "cpu")
    torch.manual_seed(before)
    depth = torch.tensor([0, 1, 1, 2, 3, 3][:nodes])
    tree = torch.tensor([[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0], [1, 1, 0, 1, 1, 0]])
    tree = torch.cat((tree, torch.tensor([[1, 1, 0, 1, 0, 1]]))).bool()[:nodes, :nodes]
    padding = 0 if nodes == 1 else 2
    visible = torch.nn.functional.pad(tree, (0, padding, 0, padding))
    rows = torch.cat((before + torch.arange(nodes), torch.full((padding,), CAPACITY - 1)))
    query = torch.randn(1, HEADS * GROUP, nodes + padding, SIZE, dtype=torch.double)
    key, value = (torch.randn(1, HEADS, CAPACITY, SIZE, dtype=torch.double) for _ in range(2))
    parts = key_parts(visible, rows, CAPACITY, GROUP, query.dtype, window, MIN_BLOCK)
    assert (parts.rows is None) == (nodes == 1)
    assert len(parts.key_ends) - 1 == (8 if window is None else max(window // MIN_BLOCK, 1))
    assert int(parts.key_ends.diff().max()) <= parts.most
    found = attend_in_parts(query, key, value, parts, 1.0)
    seen = torch.cat((torch.ones(nodes, before, dtype=torch.bool), tree), 1)
    places = torch.cat((torch.arange(before), before + depth))
    if window is not None:
        seen = seen & (places > before + depth[:, None] - window)
    folded = query[:, :, :nodes].reshape(1, HEADS, -1, SIZE)
    used = (states[:, :, : before + nodes] for states in (key, value))
    expected = reference(folded, *used, seen.repeat(GROUP, 1)).view(1, -1, nodes, SIZE)
    torch.testing.assert_close(found[:, :, :nodes], expected, **EXACT)
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("nodes", [1, 16])
def test_kernels_of_a_gpu_take_these_arguments(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    """The schemas and result shapes of the installed torch; no number is read from the device."""
    monkeypatch.setattr(prefix_attention, "KERNEL_DEVICES", ("meta",))
    with torch.device("meta"):
        query = torch.empty(1, 28, nodes, 128, dtype=torch.bfloat16)
        key, value = torch.empty(2, 1, 4, 2048, 128, dtype=torch.bfloat16)
        visible, rows = torch.ones(nodes, nodes, dtype=torch.bool), torch.arange(nodes)
        for window in (None, 600):
            parts = key_parts(visible, rows, 2048, 7, torch.bfloat16, window)
            out = attend_in_parts(query, key, value, parts, 128**-0.5)
            assert out.shape == query.shape and out.dtype is torch.bfloat16 and out.is_meta
            assert parts.query_ends.dtype is parts.key_ends.dtype is torch.int32
            assert parts.mask is None or all(stride % 8 == 0 for stride in parts.mask.stride()[:-1])


def test_kernels_are_compared_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that fail, or that differ, are not used, with one warning; here in place of those of a GPU."""
    cpu, unmasked = torch.device("cpu"), prefix_attention._unmasked
    use_gpu_kernels(monkeypatch, "cpu")
    monkeypatch.setattr(prefix_attention, "has_flash_kernel", lambda device: True)
    monkeypatch.setattr(prefix_attention, "kernel_problem", prefix_attention.kernel_problem.__wrapped__)
    reason_of = partial(prefix_attention.why_masked, cpu, torch.bfloat16)
    assert reason_of(64) == ""

    def failing(*_: object) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no kernel image is available")

    def as_if_more_keys_were_there(query: Tensor, key: Tensor, value: Tensor, parts: Any, *rest: Any) -> tuple[Tensor, Tensor]:
        return unmasked(query, key, value, replace(parts, key_ends=parts.key_ends + 200), *rest)

    for kernel, message in ((failing, "no kernel image"), (as_if_more_keys_were_there, "differ from the reference by")):
        monkeypatch.setattr(prefix_attention, "_unmasked", kernel)
        with pytest.warns(UserWarning, match=f"mask all keys.*torch {torch.__version__.split('+')[0]}.*{message}") as caught:
            assert message in reason_of(64) and message in reason_of(64)
        assert len(caught) == 1


@pytest.mark.parametrize(
    ("dtype", "head_dim", "has_flash", "reason"),
    [
        (torch.float32, 64, True, "float32 is not a dtype of the flash kernel"),
        (torch.bfloat16, 84, True, "a head size of 84 is not a multiple of 8 up to 256"),
        (torch.bfloat16, 264, True, "a head size of 264 is not"),
        (torch.float16, 64, False, "compute capability 8.0"),
    ],
)
def test_the_condition_that_is_not_met_is_named(monkeypatch, dtype, head_dim, has_flash, reason):
    monkeypatch.setattr(prefix_attention, "has_flash_kernel", lambda device: has_flash)
    with pytest.warns(UserWarning, match=f"mask all keys.*{reason}"):
        assert reason in prefix_attention.why_masked(torch.device("cuda"), dtype, head_dim)

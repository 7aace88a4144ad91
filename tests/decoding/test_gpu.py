"""Decoding on GPUs, tested without one: devices, streams, attention backends, dtypes of buffers. See docs/gpu.md."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from support.fake_cuda import FakeCuda, fake_cuda
from support.models import make_inputs, make_qwen, random_draft
from torch.utils._python_dispatch import TorchDispatchMode

import sage
from sage import attention
from sage.attention import repeat_mask, tile_mask
from sage.cli import resolve_device
from sage.costs.timing import Clock
from sage.drafts.model import shallow_model
from sage.targets.families.qwen2_5_vl import PatchProjection
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


def test_patch_embedding_is_a_matrix_product() -> None:
    target = make_qwen()
    convolution = torch.nn.Conv3d(3, 16, (2, 4, 4), (2, 4, 4), bias=False, dtype=torch.float64)
    projection = target.model.model.visual.patch_embed.proj
    assert isinstance(projection, PatchProjection)  # of every target, and so of the teacher
    assert "model.visual.patch_embed.proj.weight" in target.model.state_dict()
    convolution.weight.data.copy_(projection.weight)
    patches = torch.randn(7, 3, 2, 4, 4, dtype=torch.float64)
    expected = convolution(patches).flatten(1)
    torch.testing.assert_close(PatchProjection(convolution).linear(patches), expected, atol=1e-14, rtol=0)
    assert torch.equal(PatchProjection(convolution)(patches).flatten(1), expected)  # on the CPU


def test_no_convolution_runs_beside_the_cpu() -> None:
    operators = Operators()
    projection = make_qwen().model.model.visual.patch_embed.proj.to("meta")
    with operators:
        assert projection(torch.empty(7, 3, 2, 4, 4, device="meta")).shape == (7, 16)
    assert not any("conv" in name for name in operators.names)


class Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 9), (1, 4)])
@pytest.mark.parametrize("is_grouped", [True, False])
def test_causal_attention_equals_a_masked_softmax(
    dtype: torch.dtype, group: int, queries: int, keys: int, is_grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_takes_grouped_heads", lambda query: is_grouped)
    query, key, value = (torch.randn(2, heads, n, 8, dtype=dtype) for heads, n in ((2 * group, queries), (2, keys), (2, keys)))
    found = attention.causal_attention(query, key, value, 0.3)
    wide = [states.double().repeat_interleave(group, 1) for states in (key, value)]
    scores = query.double() @ wide[0].transpose(-1, -2) * 0.3
    future = torch.arange(keys) > torch.arange(keys - queries, keys)[:, None]
    expected = scores.masked_fill(future, -torch.inf).softmax(-1) @ wide[1]
    torch.testing.assert_close(found.double(), expected, atol=1e-12 if dtype == torch.float64 else 1e-5, rtol=0)


def test_grouped_heads_in_float32_are_repeated_beside_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU kernels that take grouped heads take half precision only; the fallback stores all attention weights."""
    heads: dict[torch.dtype, tuple[int, int, bool]] = {}

    def recorded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool, **_: Any) -> torch.Tensor:
        heads[query.dtype] = query.shape[1], key.shape[1], enable_gqa
        return query

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    for dtype in (torch.float32, torch.bfloat16):
        query, key = (torch.empty(1, count, 4, 8, dtype=dtype, device="meta") for count in (4, 2))
        attention.causal_attention(query, key, key)
    assert heads == {torch.float32: (4, 4, False), torch.bfloat16: (4, 2, True)}


def test_a_second_prefill_has_no_mask(tiny_target: sage.Target) -> None:
    """2000 new tokens after 8000 would take a mask of 280 MB at 7B."""
    prompt, cache = tiny_target.embed(make_inputs(tiny_target)), tiny_target.new_cache(64)
    complete = tiny_target.prefill(prompt, tiny_target.new_cache(64)).last
    masks: list[Any] = []
    tiny_target.text_model.register_forward_pre_hook(
        lambda _, __, named: masks.append(named["attention_mask"]), with_kwargs=True
    )
    first = tiny_target.prefill(prompt.at(torch.arange(5)), cache).last
    second = tiny_target.prefill(prompt.after(5), cache).last
    torch.testing.assert_close(torch.cat((first, second), 1), complete, atol=1e-5, rtol=0)
    assert masks == [{"full_attention": None}] * 2


@pytest.mark.parametrize("keys", [1, 7, 8, 9])
@pytest.mark.parametrize("group", [1, 3])
def test_rows_of_masks_are_aligned(keys: int, group: int) -> None:
    visible = torch.rand(5, keys) < 0.5
    additive = torch.zeros(5, keys).masked_fill(~visible, torch.finfo(torch.float32).min)
    for mask in (tile_mask(visible, group, torch.float32), repeat_mask(additive, group)):
        assert torch.equal(mask, additive.repeat(group, 1)[None, None])
        assert all(stride % 8 == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) == 1


def test_masks_of_tree_and_draft_passes_are_aligned(tiny_target: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    strides: list[int] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def recorded(*args: Any, attn_mask: Any = None, **options: Any) -> torch.Tensor:
        strides.extend(() if attn_mask is None else attn_mask.stride()[:-1])
        return attend(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    sage.generate(tiny_target, random_draft(tiny_target), make_inputs(tiny_target), policy="static", max_new_tokens=9)
    assert strides and all(stride % 8 == 0 for stride in strides)


def test_only_the_requested_hidden_states_are_kept(tiny_target: sage.Target) -> None:
    prompt, levels = tiny_target.embed(make_inputs(tiny_target)), (3, 1, 0)
    outputs: list[weakref.ref[torch.Tensor]] = []
    for layer in tiny_target.text_model.layers:
        layer.register_forward_hook(lambda _, __, out: outputs.append(weakref.ref(out)))
    features = tiny_target.prefill(prompt, tiny_target.new_cache(64), levels)
    assert [output() is not None for output in outputs] == [True, False, False]
    assert {len(layer._forward_hooks) for layer in tiny_target.text_model.layers} == {1}  # those of this test
    with torch.no_grad():
        expected = tiny_target.text_model(
            inputs_embeds=prompt.embeds, position_ids=prompt.position_ids, output_hidden_states=True
        ).hidden_states
    assert len(features.levels) == 3
    for k, level in zip(levels, features.levels, strict=True):
        torch.testing.assert_close(level, expected[k], atol=1e-5, rtol=0)


def test_a_seed_draws_weights_beside_several_gpus(fake_cuda: FakeCuda) -> None:
    """`fork_rng` warns, which is an error here, if it has to save the generators of several GPUs."""
    target = make_qwen()
    state = torch.random.get_rng_state()
    first, second = (sage.new_draft(target, "eagle", seed=3) for _ in range(2))
    assert torch.equal(first.fc.weight, second.fc.weight)
    assert torch.equal(state, torch.random.get_rng_state())

"""Decoding on GPUs, tested without one: devices, streams, attention backends, dtypes of buffers. See docs/gpu.md."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_cuda import FakeCuda
from support.messages import refused
from support.models import in_float64, make_inputs, make_qwen, random_draft
from support.processors import image_part, make_processor, user
from torch.nn.attention.bias import causal_lower_right

import sage
from sage.commands.cli import resolve_device
from sage.decoding.generation import start
from sage.drafts.model import ModelDraft, shallow_model
from sage.io.model_files import load_weights
from sage.runtime import attention, modes
from sage.runtime.modes import VisionAttention, resolve_attention
from sage.targets import loading
from sage.targets.families.qwen2_5_vl import PatchProjection
from sage.targets.loading import set_attention
from train.launch.ranks import pick_device


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


@pytest.mark.parametrize(("dtype", "group"), [(torch.float64, 3), (torch.float32, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 9), (1, 4)])
@pytest.mark.parametrize("is_gpu", [True, False])
def test_causal_attention_equals_a_masked_softmax(dtype, group, queries, keys, is_gpu, monkeypatch):
    if is_gpu:
        monkeypatch.setattr(attention, "_takes_grouped_heads", lambda query: False)
        monkeypatch.setattr(attention, "_lower_right", lambda queries, keys, _: causal_lower_right(queries, keys))
    query, key, value = (torch.randn(2, heads, n, 8, dtype=dtype) for heads, n in ((2 * group, queries), (2, keys), (2, keys)))
    found = attention.causal_attention(query, key, value, 0.3)
    wide = [states.double().repeat_interleave(group, 1) for states in (key, value)]
    scores = query.double() @ wide[0].transpose(-1, -2) * 0.3
    future = torch.arange(keys) > torch.arange(keys - queries, keys)[:, None]
    expected = scores.masked_fill(future, -torch.inf).softmax(-1) @ wide[1]
    torch.testing.assert_close(found.double(), expected, atol=1e-12 if dtype == torch.float64 else 1e-5, rtol=0)


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
    assert masks == [None] * 2


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


@pytest.mark.parametrize(("kind", "keep_prefix"), [("eagle3", False), ("eagle3", True), ("model", False)])
def test_the_prefill_releases_what_only_a_chat_reads_again(tiny_target: sage.Target, kind: str, keep_prefix: bool) -> None:
    """Features, embeddings and pixels of a prompt of 32k tokens take 2 GB with EAGLE-3 at 7B."""
    draft = ModelDraft(tiny_target, tiny_target) if kind == "model" else random_draft(tiny_target, kind)
    inputs = {key: value.clone() for key, value in make_inputs(tiny_target).items()}
    generation = start(tiny_target, draft, inputs, policy="static", max_new_tokens=8, keep_prefix=keep_prefix)
    del inputs
    prompt = generation.request.prompt
    kept = [weakref.ref(tensor) for tensor in (prompt.embeds, prompt.inputs["pixel_values"], *prompt.visual.values())]
    del prompt
    rounds = generation.rounds()
    next(rounds)
    assert [tensor() is not None for tensor in kept] == [keep_prefix] * 3
    assert len(generation.request.features) == keep_prefix
    for _ in rounds:
        pass
    assert (
        generation.output().tokens.tolist()
        == sage.generate(tiny_target, draft, make_inputs(tiny_target), policy="static", max_new_tokens=8).tokens.tolist()
    )


def test_a_seed_draws_weights_beside_several_gpus(fake_cuda: FakeCuda) -> None:
    """`fork_rng` warns, which is an error here, if it has to save the generators of several GPUs."""
    target = make_qwen()
    state = torch.random.get_rng_state()
    first, second = (sage.new_draft(target, "eagle", seed=3) for _ in range(2))
    assert torch.equal(first.fc.weight, second.fc.weight)
    assert torch.equal(state, torch.random.get_rng_state())


class TestLoading:
    """`load_target`: where the weights go, and the attention of the vision tower."""

    def options(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Any]:
        """Returns the options that `from_pretrained` gets for a GPU."""
        seen: dict[str, Any] = {}

        def load(kind: Any, path: str, role: str, **given: Any) -> Any:
            seen.update(given)
            given.pop("device_map", None)
            return load_weights(kind, path, role, **given)

        monkeypatch.setattr(loading, "load_weights", load)
        monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: seen.setdefault("moved to", device) and module)
        sage.load_target(folder, torch.float32, **options)
        return seen

    def test_weights_go_straight_to_the_gpu(self, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = self.options(target, monkeypatch, device="cuda:1")
        assert seen["device_map"] == {"": torch.device("cuda:1")} and "moved to" not in seen

    def test_a_strategy_that_offloads_is_refused(self, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def load(*args: Any, **options: Any) -> Any:
            assert options["device_map"] == "auto"
            model = make_qwen().model
            model.hf_device_map = {"model.visual": 0, "model.language_model.layers.2": "cpu", "lm_head": "disk"}
            return model

        monkeypatch.setattr(loading, "load_weights", load)
        with refused("device_map: ", "model.language_model.layers.2", "cpu and disk", "more or larger GPUs"):
            sage.load_target(target, device_map="auto")

    @pytest.mark.parametrize(
        ("device", "is_half", "is_installed", "is_packed", "is_ampere", "expected"),
        [("cuda", True, True, True, True, "flash_attention_2"), ("cuda", True, False, True, True, "varlen"),
         ("cuda", True, False, False, True, "sdpa"), ("cuda", True, False, True, False, "sdpa"),
         ("cuda", False, True, True, True, "sdpa"), ("cpu", True, True, True, False, "sdpa")],
    )  # fmt: skip
    def test_auto(self, device, is_half, is_installed, is_packed, is_ampere, expected, monkeypatch):
        monkeypatch.setattr(modes, "has_flash_attention", lambda: is_installed)
        assert resolve_attention(VisionAttention.auto, device, is_half, is_packed, is_ampere) == expected

    def test_varlen_attends_within_windows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def naive(query: Any, key: Any, value: Any, ends: Any, _: Any, longest: int, __: int) -> torch.Tensor:
            sizes.extend(ends.diff().tolist())
            assert max(sizes) == longest
            parts = [states.split(sizes) for states in (query, key, value)]
            scores = [torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5 for q, k, _ in zip(*parts, strict=True)]
            return torch.cat([torch.einsum("hqk,khd->qhd", s.softmax(-1), v) for s, v in zip(scores, parts[2], strict=True)])

        sizes: list[int] = []
        monkeypatch.setattr(attention, "varlen_attn", naive)
        target = make_qwen()
        target.model.config.vision_config.fullatt_block_indexes.clear()
        processor = make_processor(target)
        inputs = in_float64(target, processor.prepare(user(image_part(32, 24), "what?")))
        expected = target.embed(inputs).embeds
        set_attention(target.model, VisionAttention.varlen)
        torch.testing.assert_close(target.embed(inputs).embeds, expected, atol=1e-12, rtol=0)
        assert len(sizes) > 1  # windows of one call

    def test_mistakes(self, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with refused("target.attention: 'fast'", "auto, eager, sdpa, flash_attention_2, varlen"):
            sage.load_target(target, attention="fast")
        monkeypatch.setattr(modes, "has_flash_attention", lambda: False)
        with refused("target.attention: flash_attention_2", "flash-attn", "not installed"):
            sage.load_target(target, attention="flash_attention_2")
        monkeypatch.setattr(modes, "has_flash_attention", lambda: True)
        for choice in ("flash_attention_2", "varlen"):
            with refused(f"target.attention: {choice}", "GPU", "cpu"):
                sage.load_target(target, attention=choice)
        with refused("target.attention: varlen", "qwen2_5_vl"):
            resolve_attention(VisionAttention.varlen, "cuda", True, is_packed=False, is_ampere=True)
        with refused("target.attention: varlen", "8.0"):
            resolve_attention(VisionAttention.varlen, "cuda", True, is_packed=True, is_ampere=False)

"""A target on two devices of one machine decodes as on one: cache and masks of each layer are on the layer's device."""

import copy
from typing import Any

import pytest
import torch
from support.accelerator import DEVICES, Kind, Traffic, on_device, on_host
from support.messages import refused
from support.models import MAKERS, in_float64, make_inputs, make_qwen, random_draft
from support.pass_helpers import tree_pass
from support.processors import make_processor, random_image

import sage
from sage.drafts.model import ModelDraft
from sage.targets.placement import check_device_map

LENGTH = 16
hooks: Any = pytest.importorskip("accelerate.hooks")  # not needed for a target on one device


def spread(target: sage.Target) -> sage.Target:
    """The same target with its first layer, embedding and vision tower on one device and the rest on another."""
    model = copy.deepcopy(target.model)
    modules = [f"model.{name}" for name, _ in model.model.named_children() if name != "language_model"]
    device_map = dict.fromkeys(modules, DEVICES[0])
    text = "model.language_model"
    device_map |= {f"{text}.embed_tokens": DEVICES[0], f"{text}.rotary_emb": DEVICES[0], f"{text}.layers.0": DEVICES[0]}
    device_map |= {f"{text}.layers.1": DEVICES[1], f"{text}.layers.2": DEVICES[1], f"{text}.norm": DEVICES[1]}
    device_map["lm_head"] = DEVICES[1]
    if hasattr(model.model, "image_newline"):
        device_map["model.image_newline"] = DEVICES[0]
        model.model.image_newline = torch.nn.Parameter(on_device(model.model.image_newline.detach()))
    for name, device in device_map.items():
        if "newline" not in name:
            on_device(model.get_submodule(name), device)
    model.hf_device_map = device_map
    return sage.Target(model, make_processor(target))


def drafts(one: sage.Target, two: sage.Target, kind: str) -> tuple[Any, Any]:
    """The same draft for the target on one and on two devices."""
    if kind == "model":
        smaller = MAKERS[one.family.model_type](seed=7)
        smaller.model.double()
        return ModelDraft(smaller, one), ModelDraft(sage.Target(on_device(copy.deepcopy(smaller.model), two.device)), two)
    first, second = (random_draft(target, kind) for target in (one, two))
    second.load_state_dict({name: on_device(value, two.device) for name, value in first.state_dict().items()})
    return first, second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "policy", "family"),
    [("eagle", "sage", "qwen2_5_vl"), ("eagle3", "eagle2", "llava_onevision"), ("model", "static", "qwen2_5_vl")],
)
def test_text_and_accepted_lengths_equal_those_of_one_device(traffic: Traffic, family: str, policy: str, kind: str) -> None:
    one = MAKERS[family]()
    inputs = in_float64(one, make_inputs(one))
    two = spread(one)
    assert two.device == DEVICES[1] and two.layer_devices == [DEVICES[0], DEVICES[1], DEVICES[1]]
    options: dict[str, Any] = {"policy": policy, "max_new_tokens": LENGTH}
    if kind == "eagle":
        options |= {"pruning": sage.Pruning(0.5), "temperature": 0.8}
    first, second = drafts(one, two, kind)
    expected, found = sage.generate(one, first, inputs, **options), sage.generate(two, second, inputs, **options)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.stats.accepted == expected.stats.accepted


@pytest.mark.parametrize("family", MAKERS)
def test_a_second_turn(traffic: Traffic, family: str) -> None:
    one = MAKERS[family]()
    two = spread(one)
    chats = [
        sage.Chat(target, None, policy="autoregressive", max_new_tokens=4)
        for target in (sage.Target(one.model, make_processor(one)), two)
    ]
    for text, images in (("one", [random_image(16, 8)]), ("two", [])):
        expected, found = (chat.ask(text, images) for chat in chats)
        assert found.tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize("family", MAKERS)
def test_generate_of_hugging_face_runs_as_well(traffic: Traffic, family: str) -> None:
    """The baselines of a report decode the same model object."""
    one = MAKERS[family]()
    inputs = in_float64(one, make_inputs(one))
    two = spread(one)
    expected = one.model.generate(**inputs, max_new_tokens=6, do_sample=False)
    found = two.model.generate(**on_device(inputs, two.device), max_new_tokens=6, do_sample=False)
    assert on_host(found).tolist() == expected.tolist()


def test_hooks_of_accelerate_are_replaced(traffic: Traffic) -> None:
    target = make_qwen()
    layers: Any = target.text_model.layers
    hooks.add_hook_to_module(layers[0], hooks.ModelHook())
    target.model.hf_device_map = {"model.visual": "cpu", "model.language_model.layers.0": "cpu", "lm_head": 0}
    before = target.features(target.embed(make_inputs(target))).last
    again = sage.Target(target.model)
    assert not any(hasattr(module, "_hf_hook") for module in target.model.modules())
    assert len(layers[0]._forward_pre_hooks) == 1 and not layers[1]._forward_pre_hooks
    assert torch.equal(again.features(again.embed(make_inputs(again))).last, before)


def test_a_pass_copies_each_tensor_once(traffic: Traffic) -> None:
    """To the first layer: the hidden states, mask, rope and positions; to the second and third, which share a device: the
    hidden states. Rope and positions come from the device of the third.
    """
    target = spread(make_qwen())
    cache = target.new_cache(32)
    token, position = on_device((torch.tensor([5, 6]), torch.arange(2)), target.device)
    visible = on_device(torch.ones(2, 2, dtype=torch.bool).tril(), target.device)
    tree_pass(target, token, position, visible, cache)
    cache.keep_path(0, [0])
    traffic.reset()
    tree_pass(target, token, position + 1, visible, cache)
    assert 2 <= traffic.count(Kind.BETWEEN_DEVICES) <= 6, traffic.table()


def test_the_cache_moves_rows_on_every_device(traffic: Traffic) -> None:
    target = spread(make_qwen())
    cache = target.new_cache(8)
    assert [buffer.device for buffer in cache.buffers] == list(DEVICES) and cache.capacity == 8
    for number, layer in enumerate(cache.layers):
        rows = on_device(torch.arange(5.0).expand(1, 2, 8, 5).mT + 10 * number, layer.keys.device)
        layer.update(rows, rows)
    cache.keep_path(1, [0, 2])
    cache.grow_to(16)
    assert cache.capacity == 16 and cache.length == 3
    for number, layer in enumerate(cache.layers):
        assert on_host(layer.keys[0, 0, :3, 0]).tolist() == [10 * number, 10 * number + 1, 10 * number + 3]


@pytest.mark.parametrize(
    ("device_map", "words"),
    [
        ({"a": 0, "b": "cpu"}, ("b ", "more or larger GPUs")),
        ({"": "disk"}, ("the model", "more or larger GPUs")),
        ("fast", ("device_map: 'fast'", "auto, balanced")),
    ],
)
def test_offloading_and_unknown_strategies_are_refused(device_map: Any, words: tuple[str, ...]) -> None:
    with refused("device_map: ", *words):
        check_device_map(device_map)

"""Decoding on the pretend accelerator: the same tokens as on the CPU, and no tensor on the wrong device."""

from typing import Any

import pytest
import torch
from support.accelerator import IS_SUPPORTED, on_device, pretend_accelerator
from support.compressor_helpers import COMPRESSORS, CONVERSATIONS, draft_with, example, prompt_of, starts_of_answers
from support.messages import refused
from support.models import MAKERS, make_inputs, make_qwen, near_draft, random_draft
from support.processors import make_processor
from support.toy_helpers import make_policy
from transformers import LogitsProcessor

import sage
from sage.drafts.draft import Draft
from sage.drafts.model import ModelDraft, shallow_model

LENGTH = 7
pytestmark = pytest.mark.skipif(not IS_SUPPORTED, reason="this torch cannot register a device type written in Python")


def make_draft(kind: str, target: sage.Target) -> Draft:
    return shallow_model(target, 2) if kind == "shallow" else draft_with(target, kind, None)


def assert_equal_on_device(target: sage.Target, draft: Draft | None, inputs: Any, policy: str, **options: Any) -> sage.Output:
    """Decodes on the CPU, moves target and draft to the accelerator, and decodes again; returns the second answer."""

    def decoded() -> sage.Output:
        return sage.generate(target, draft, inputs, make_policy(policy), max_new_tokens=LENGTH, **options)

    expected = decoded()
    with pretend_accelerator():
        on_device(target)
        if draft is not None:
            on_device(draft.model if isinstance(draft, ModelDraft) else draft)
        found = decoded()
    assert found.tokens.device.type == "cpu" and found.tokens.tolist() == expected.tokens.tolist()
    assert policy == "cost_aware" or found.stats.accepted == expected.stats.accepted  # which plans by measured times
    return found


@pytest.mark.parametrize(
    ("kind", "family"), [("eagle", "qwen2_5_vl"), ("eagle3", "llava_onevision"), ("shallow", "qwen2_5_vl")]
)
def test_every_draft(kind: str, family: str) -> None:
    target = MAKERS[family]()
    assert_equal_on_device(target, make_draft(kind, target), make_inputs(target), "eagle2")


@pytest.mark.parametrize(("name", "is_eagle"), [(name, number % 2 == 0) for number, name in enumerate(COMPRESSORS)])
def test_every_compressor(name: str, is_eagle: bool) -> None:
    family, kind = ("llava_onevision", "eagle") if is_eagle else ("qwen2_5_vl", "eagle3")
    target = MAKERS[family]()
    assert_equal_on_device(target, draft_with(target, kind, COMPRESSORS[name]), make_inputs(target), "chain")


@pytest.mark.parametrize(
    ("name", "family"), [*((name, "qwen2_5_vl") for name in CONVERSATIONS), ("two turns", "llava_onevision")]
)
def test_every_input(name: str, family: str) -> None:
    target = MAKERS[family]()
    whole = example(target, CONVERSATIONS[name])
    inputs = prompt_of(target, whole, starts_of_answers(whole["loss_mask"])[-1])
    assert_equal_on_device(target, make_draft("eagle", target), inputs, "static")


class Forbid(LogitsProcessor):
    """Forbids the token after the last one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -1:] + 1, -torch.inf)


ALL: dict[str, Any] = {
    "top_k": 90,
    "top_p": 0.95,
    "repetition_penalty": 1.2,
    "min_new_tokens": 4,
    "logits_processor": [Forbid()],
}


@pytest.mark.parametrize(
    ("options", "temperature", "policy"),
    [
        *[(options, 0.8, "sage") for options in ({"min_p": 0.01}, {"bad_words": ["e"]})],
        *[(ALL, 0.0, "eagle2"), (ALL, 0.8, "cost_aware")],
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_every_processor(options: dict[str, Any], temperature: float, policy: str) -> None:
    target = make_qwen()
    target = sage.Target(target.model, make_processor(target))
    draft = near_draft(target)
    assert_equal_on_device(target, draft, make_inputs(target), policy, temperature=temperature, seed=3, **options)


@pytest.mark.parametrize(
    ("method", "family"), [("attention", "qwen2_5_vl"), ("attention", "llava_onevision"), ("random", "qwen2_5_vl")]
)
def test_pruning(method: str, family: str) -> None:
    target = MAKERS[family]()
    pruning = sage.Pruning(ratio=0.5, method=method)
    assert_equal_on_device(target, make_draft("eagle", target), make_inputs(target), "chain", pruning=pruning)


@pytest.mark.parametrize("policy", ["chain", "eagle2"])
def test_nan_in_the_draft_is_refused(policy: str) -> None:
    target = make_qwen()
    draft = random_draft(target)
    draft.fc.weight.data[0] = float("nan")
    with pretend_accelerator(), refused("draft", "level", "NaN"):
        sage.generate(on_device(target), on_device(draft), make_inputs(target), policy, max_new_tokens=LENGTH)

"""Bounds of device synchronizations and copies per round, for every policy, eager and captured; see docs/gpu.md."""

from typing import Any

import pytest
from support.accelerator import DEVICE, Traffic, on_device
from support.fake_cuda import use_gpu_kernels
from support.models import make_inputs, make_llava, make_qwen, near_draft
from support.pass_helpers import call_again, capture_with, head
from support.synchronizations import MAX_UPLOADS, RoundCounts, count_rounds
from support.toy_helpers import make_policy

import sage
from sage.drafts.model import ModelDraft
from sage.runtime import captured
from sage.runtime.modes import PassMode


def rounds_of(traffic: Traffic, name: str, kind: str = "near", **options: Any) -> list[RoundCounts]:
    """Rounds of the second of two requests: cached shapes, as in a service. Their tokens are those of the CPU."""
    target, draft = make_qwen(), None
    if name != "autoregressive":
        draft = near_draft(target) if kind == "near" else sage.new_draft(target, "eagle", seed=0)
    requests = [make_inputs(target, seed) for seed in range(2)]
    expected = [sage.generate(target, draft, inputs, make_policy(name), **options).tokens.tolist() for inputs in requests]
    on_device(draft.model if isinstance(draft, ModelDraft) else draft)
    on_device(target)
    for inputs, tokens in zip(requests, expected, strict=True):
        counts = count_rounds(traffic, target, draft, inputs, make_policy(name), **options)
        assert counts.tokens == tokens
    assert len(counts.rounds) > 1
    return counts.rounds


@pytest.mark.parametrize(
    ("name", "kind", "temperature"),
    [*((name, "near", 0.0) for name in sage.POLICIES), ("sage", "eagle", 1.0), ("eagle2", "eagle", 1.0)],
)
def test_bounds_per_round(traffic: Traffic, name: str, kind: str, temperature: float) -> None:
    for counts in rounds_of(traffic, name, kind, max_new_tokens=7, temperature=temperature):
        assert counts.synchronizations <= counts.levels + 1, counts
        assert counts.uploads <= MAX_UPLOADS and counts.blocking_uploads == 0, counts


def test_processors_that_depend_on_the_prefix_upload_the_emitted_tokens(traffic: Traffic) -> None:
    for counts in rounds_of(traffic, "sage", max_new_tokens=7, repetition_penalty=1.1):
        assert counts.synchronizations <= counts.levels + 1, counts
        assert counts.uploads <= MAX_UPLOADS + 1 and counts.blocking_uploads == 0, counts


@pytest.mark.parametrize(
    ("make", "kind", "case"),
    [
        *(pytest.param(make_qwen, "eagle3", f"{name} 0", marks=pytest.mark.slow) for name in sage.POLICIES),
        *((make, kind, "sage 1") for make, kind in ((make_qwen, "eagle3"), (make_llava, "near"))),
    ],
)
def test_equal_tokens_and_bounds_of_captured_passes(traffic, make, kind, case, monkeypatch):
    """The eager tokens of the CPU; synchronizations at most levels + 1. `case`: policy and temperature.

    A replay calls the function again, and attention in two parts the kernels of a GPU, imitated.
    """
    capture_with(monkeypatch, call_again)
    calls = use_gpu_kernels(monkeypatch, DEVICE.type)
    monkeypatch.setattr(captured, "why_masked", lambda *_: "")
    target = make()
    draft: Any = near_draft(target) if kind == "near" else head(target, kind)
    policy, temperature = case.split()
    options = {"max_new_tokens": 7, "temperature": float(temperature), "seed": 3}
    inputs = make_inputs(target)
    expected = sage.generate(target, draft, inputs, make_policy(policy), **options).tokens.tolist()
    target.passes = PassMode.captured
    on_device(draft.model if kind == "near" else draft)
    on_device(target)
    for _ in range(2):  # the first request captures
        counts = count_rounds(traffic, target, draft, inputs, make_policy(policy), **options)
        assert counts.tokens == expected
    assert calls["varlen_attn"] and bool(calls["efficient_attention"]) == (policy != "autoregressive")
    for one in counts.rounds:
        assert one.synchronizations <= one.levels + 1, counts.lines
        assert one.uploads <= MAX_UPLOADS and one.blocking_uploads == 0, counts.lines

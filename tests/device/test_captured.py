"""Captured passes on the pretend accelerator, where a replay calls the function again: texts, devices, synchronizations."""

from __future__ import annotations

from typing import Any

import pytest
from support.accelerator import IS_SUPPORTED, Traffic, on_device
from support.models import make_inputs, make_llava, make_qwen
from support.near_draft import near_draft
from support.pass_helpers import capture_with, head, slow_except
from support.synchronizations import MAX_UPLOADS, count_rounds, new_policy

import sage
from sage.runtime.captured import call_again
from sage.runtime.pass_modes import PassMode

pytestmark = pytest.mark.skipif(not IS_SUPPORTED, reason="this torch cannot register a device type written in Python")


@pytest.fixture(autouse=True)
def without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_with(monkeypatch, call_again)


@pytest.mark.parametrize(("make", "kind"), [(make_qwen, "eagle"), (make_llava, "eagle3"), (make_llava, "near")])
@pytest.mark.parametrize(
    "case", slow_except(("chain 0", "sage 1"), [f"{name} 0" for name in sage.POLICIES] + ["chain 1", "sage 1"])
)
def test_equal_tokens_and_bounds_per_round(traffic: Traffic, make: Any, kind: str, case: str) -> None:
    """The eager tokens of the CPU; synchronizations at most levels + 1. `case`: policy and temperature."""
    target = make()
    draft: Any = near_draft(target) if kind == "near" else head(target, kind)
    policy, temperature = case.split()
    options = {"max_new_tokens": 7, "temperature": float(temperature), "seed": 3}
    inputs = make_inputs(target)
    expected = sage.generate(target, draft, inputs, new_policy(policy), **options).tokens.tolist()
    target.passes = PassMode.captured
    on_device(draft.model if kind == "near" else draft)
    on_device(target)
    for _ in range(2):  # the first request captures
        counts = count_rounds(traffic, target, draft, inputs, new_policy(policy), **options)
        assert counts.tokens == expected
    for one in counts.rounds:
        assert one.synchronizations <= one.levels + 1, counts.lines
        assert one.uploads <= MAX_UPLOADS and one.blocking_uploads == 0, counts.lines

"""Traces of the prompts that a measurement decoded best and worst, decoded once more when all times are taken."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sage.bench.measurement import BenchPrompt
from sage.bench.runners import on_device
from sage.decoding.generation import start
from sage.decoding.settings import Sampling
from sage.planning.base import Policy
from sage.replay.trace import Trace, TraceRecorder, decode_race
from train.report.prompt_list import drafting_by_speed, ranked_prompts

FOLDER = "traces"
NUM_POLICIES = 2  # the fastest ones


@dataclass(frozen=True, kw_only=True)
class PromptTrace:
    """A trace, the prompt and policy by name, and the file name of its page."""

    prompt: str
    policy: str
    file: str
    trace: Trace


def trace_extremes(
    report: Mapping[str, Any],
    prompts: Sequence[BenchPrompt],
    messages: Mapping[str, Sequence[Mapping[str, Any]]],
    target: Any,
    draft: Any,
    policies: Mapping[str, Policy],
    sampling: Sampling,
    count: int,
) -> Iterator[PromptTrace]:
    """Yields the traces of the `count` best and worst prompts by tokens per target pass, for the fastest policies.

    Copies of the policies decode, which know what the measured ones have learned; nothing of the report changes.

    Args:
        messages: chat messages by name of the prompt, for its text and pictures.
    """
    ranked, known = ranked_prompts(report), {prompt.name: prompt for prompt in prompts}
    chosen = list(dict.fromkeys([*ranked[:count], *ranked[max(len(ranked) - count, 0) :]])) if count else []
    names = drafting_by_speed(report)[:NUM_POLICIES]
    for place, name in enumerate(chosen, start=1):
        prompt = known[name]
        inputs = on_device(prompt.inputs, target.device)
        seeded = sampling if prompt.seed is None else replace(sampling, seed=prompt.seed)
        race = decode_race(target, inputs, seeded)
        for policy in names:
            generation = start(target, draft, inputs, copy.deepcopy(policies[policy]), sampling=seeded)
            recorder = TraceRecorder(generation)
            with torch.inference_mode():
                for emitted in generation.rounds():
                    recorder.add(emitted)
            settings = {"policy": policy, "draft": str(report["draft"]), "prompt": name}
            made = recorder.trace(settings, messages.get(name), race)
            yield PromptTrace(prompt=name, policy=policy, file=f"{place:02d}_{policy}.html", trace=made)

"""Traces of the prompts that a measurement decoded best and worst, decoded once more when all times are taken."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sage.bench.measurement import BenchPrompt
from sage.bench.runners import on_device
from sage.decoding.generation import start
from sage.decoding.settings import Sampling
from sage.planning.base import Policy
from sage.replay.trace import decode_race, record_rounds
from sage.replay.trace_page import Trace
from train.report.prompt_list import drafting_by_speed, ranked_prompts

FOLDER = "traces"
NUM_POLICIES = 2  # the fastest ones

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PromptTrace:
    """A trace, the prompt and policy by name, and its page, relative to the folder of the report."""

    prompt: str
    policy: str
    page: str
    trace: Trace


def trace_extremes(
    report: Mapping[str, Any],
    prompts: Sequence[BenchPrompt],
    target: Any,
    draft: Any,
    policies: Mapping[str, Policy],
    sampling: Sampling,
    count: int,
    progress: Callable[[int, int], None] | None = None,
    ends: tuple[type[BaseException], ...] = (),
) -> list[PromptTrace]:
    """Returns the traces of the `count` best and worst prompts by tokens per target pass, for the fastest policies.

    Copies of the policies decode, which know what the measured ones have learned; nothing of the report changes.

    Args:
        progress: called with (done, total) before each prompt; may raise one of `ends`.
        ends: exceptions that end the recording; the traces recorded before are returned.
    """
    ranked, by_name = ranked_prompts(report), {prompt.name: prompt for prompt in prompts}
    chosen = list(dict.fromkeys([*ranked[:count], *ranked[max(len(ranked) - count, 0) :]])) if count else []
    copies = {name: copy.deepcopy(policies[name]) for name in drafting_by_speed(report)[:NUM_POLICIES]}
    traces: list[PromptTrace] = []
    try:
        for place, name in enumerate(chosen, start=1):
            if progress is not None:
                progress(place - 1, len(chosen))
            settings = {"draft": str(report["draft"]), "prompt": name}
            for policy, trace in _traces(by_name[name], target, draft, copies, sampling, settings):
                page = f"{FOLDER}/{place:02d}_{policy}.html"
                traces.append(PromptTrace(prompt=name, policy=policy, page=page, trace=trace))
    except ends:
        logger.warning("interrupted after %d traces; the figures of the report are complete", len(traces))
    return traces


def _traces(
    prompt: BenchPrompt,
    target: Any,
    draft: Any,
    policies: Mapping[str, Policy],
    sampling: Sampling,
    settings: Mapping[str, str],
) -> Iterator[tuple[str, Trace]]:
    """Yields the trace of one prompt under every policy, with one race against decoding without a draft."""
    inputs = on_device(prompt.inputs, target.device)
    seeded = sampling if prompt.seed is None else replace(sampling, seed=prompt.seed)
    race = decode_race(target, inputs, seeded)
    for name, policy in policies.items():
        recorder = record_rounds(start(target, draft, inputs, policy, sampling=seeded))
        yield name, recorder.trace(settings, prompt.messages or None, race)

"""The time of validations in a plan, and the mildest change that makes them a tenth of the run. Formulas: docs/plan.md."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sage.bench.measurement import WARMUP_TOKENS
from sage.trees import AUTOREGRESSIVE
from train.config.schema import DecodeConfig, PolicyName, ValidateOn
from train.plan.memory import BYTES, Workload

TOKENS_PER_PASS = 3.0  # that a policy which drafts is assumed to reach
DRAFTING = 0.3  # share of the time of a target pass that a round needs beside it
CALLS_PER_LAYER, CALL_S = 60, 6e-6  # of an eager pass, in which Hugging Face decodes
MAX_SHARE = 0.1  # of the run
MIN_PROMPTS = 4


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the parts of a validation.

    Attributes:
        weights_s: reading the weights once, the lower bound of a pass over few tokens.
        calls_s: of the operator calls of an eager pass.
        gather_s: gathering a sharded target; 0 for a complete one.
        prefill_s: processing the prompt, without gathering.
        ranks: that decode, each a part of the prompts.
    """

    weights_s: float
    calls_s: float
    gather_s: float
    prefill_s: float
    ranks: int


def pass_times(work: Workload, forward_s: float, gather_s: float) -> PassTimes:
    """Returns the times of a run's target.

    Args:
        forward_s: of vision tower and text layers over the longest example.
        gather_s: of one pass of a sharded target.
    """
    target, models = work.models.target, work.models
    return PassTimes(
        weights_s=models.read_parameters * BYTES[work.config.target.dtype] / work.bytes_per_s,
        calls_s=target.num_layers * CALLS_PER_LAYER * CALL_S,
        gather_s=gather_s,
        prefill_s=forward_s,
        ranks=1 if work.config.deepspeed.shard_target or work.config.train.validate_on is ValidateOn.main else work.ranks,
    )


def validation_s(decode: DecodeConfig, times: PassTimes) -> float:
    """Returns the seconds of one validation whose answers all have `decode.max_new_tokens` tokens."""
    answers = math.ceil(decode.num_prompts / times.ranks) * decode.repeats
    short = min(decode.max_new_tokens, WARMUP_TOKENS)
    return answers * _answers_s(decode, times, decode.max_new_tokens) + decode.warmup * _answers_s(decode, times, short)


def _answers_s(decode: DecodeConfig, times: PassTimes, tokens: int) -> float:
    """Returns the seconds of one answer by every decoder."""
    drafting = sum(name != AUTOREGRESSIVE for name in decode.policies)
    prefills = (1 + drafting + len(decode.baselines)) * (times.prefill_s + times.gather_s)
    sequential_s = times.weights_s + times.gather_s
    eager_s = max(times.weights_s, times.calls_s) + times.gather_s
    round_s = (1 + DRAFTING) * times.weights_s + times.gather_s
    passes = tokens - 1  # the prefill yields the first token
    return prefills + passes * (sequential_s + len(decode.baselines) * eager_s + drafting * round_s / TOKENS_PER_PASS)


def smaller_settings(decode: DecodeConfig, score: PolicyName | None) -> Iterator[tuple[list[str], DecodeConfig]]:
    """Yields overrides that make a validation faster, the mildest first, and the settings with them.

    First fewer prompts, then in addition no baselines, then one policy, then shorter answers.
    """
    drafting = [name for name in decode.policies if name != AUTOREGRESSIVE]
    scored = score or ("sage" if "sage" in drafting else drafting[0] if drafting else AUTOREGRESSIVE)
    given: list[str] = []
    changes: list[tuple[list[str], dict[str, Any]]] = [
        ([], {}),
        (["decode.baselines=[]"], {"baselines": []}),
        ([f"decode.policies=[{scored}]"], {"policies": [scored]}),
        (["decode.max_new_tokens=64"], {"max_new_tokens": min(decode.max_new_tokens, 64)}),
    ]
    for words, change in changes:
        changed = replace(decode, **change)
        if change and changed == decode:
            continue
        decode, given = changed, given + words
        prompts = decode.num_prompts
        if words:
            yield given, decode
        while prompts // 2 >= MIN_PROMPTS:
            prompts //= 2
            yield [f"decode.num_prompts={prompts}", *given], replace(decode, num_prompts=prompts)

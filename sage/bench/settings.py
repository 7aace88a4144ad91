"""Settings of measurements, for the options of `sage-bench` and the keys `decode.*`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sage.decoding.settings import DraftedAnswerSettings
from sage.io.ranges import NonNegativeInt, PositiveInt, Range
from sage.trees import AUTOREGRESSIVE

HF_GENERATE = "hf_generate"
HF_STATIC = "hf_static_cache"
HF_COMPILED = "hf_compiled"
PROMPT_LOOKUP = "hf_prompt_lookup"
HF_ASSISTED = "hf_assisted"
BASELINES = (AUTOREGRESSIVE, HF_GENERATE, HF_STATIC, HF_COMPILED, PROMPT_LOOKUP, HF_ASSISTED)
MeasuredTokens = Annotated[int, Range(ge=2, remedy="the prefill yields the first token, which is not decoded")]


@dataclass(kw_only=True)
class MeasurementSettings(DraftedAnswerSettings):
    """Settings of measured answers.

    Attributes:
        repeats: timed runs per prompt; the median counts.
        warmup: untimed runs of every policy before the first prompt.
        num_prompts: maximum number of prompts; without it, all.
        batch_size: prompts that a policy decodes together; Hugging Face decodes one by one. Speedups are then those of
            throughput.
    """

    max_new_tokens: MeasuredTokens = 128
    repeats: PositiveInt = 3
    warmup: NonNegativeInt = 1
    num_prompts: PositiveInt | None = None
    batch_size: PositiveInt = 1

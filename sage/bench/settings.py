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
NODES = (1, 2, 4, 8, 16, 32, 64, 128)  # the grid of measured costs: nodes per target pass, nodes per draft level, context
WIDTHS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (256, 1024, 4096)
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


@dataclass(kw_only=True)
class CostSettings:
    """Numbers of `sage-bench costs`.

    Attributes:
        layers: layers to build; without it, all that fit, at most 2 on a CPU.
        repeats: timed passes per point; the median counts.
        bandwidth: memory bandwidth in GB/s of a device that is not measured: lower bounds by this bandwidth.
    """

    layers: PositiveInt | None = None
    repeats: PositiveInt = 5
    bandwidth: Annotated[float, Range(gt=0, remedy="in gigabytes per second")] | None = None

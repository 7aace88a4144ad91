"""The estimate of a run: memory per GPU (train.plan.memory), an optimizer step (train.plan.step_time), validations.

docs/plan.md has the formula of every figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from sage.bench.measurement import WARMUP_TOKENS
from sage.trees import AUTOREGRESSIVE
from train.config.checks import split_of_length
from train.config.run_length import run_length
from train.config.schema import Config, DecodeConfig, PolicyName, ValidateOn
from train.plan.data import Balance
from train.plan.memory import BYTES, WORKING, Extent, Workload, memory_per_gpu, validation_memory
from train.plan.meta import MetaModels
from train.plan.step_time import bytes_of_step, exposed_s, flops_of_step, transfer_s, update_s

TOKENS_PER_PASS = 3.0  # that a policy which drafts is assumed to reach
DRAFTING = 0.3  # share of the time of a target pass that a round needs beside it
CALLS_PER_LAYER, CALL_S = 60, 6e-6  # of an eager pass, in which Hugging Face decodes
MAX_SHARE = 0.1  # of the run
MIN_VALIDATIONS_S = 60  # of all validations of a run; if they take less, their share does not matter
MIN_PROMPTS = 4
TIGHT = 0.05  # of the memory


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


@dataclass(frozen=True, kw_only=True)
class LaunchPlan(Workload):
    """The needs of a run.

    Attributes:
        accumulation: micro-batches per rank and optimizer step.
        memory: bytes per GPU of a training step by component.
        validation_bytes: bytes per GPU that a validation takes beside states and target, and frees at its end.
        flops: floating-point operations of an optimizer step over all ranks, by part, for the longest examples.
        traffic: bytes that operators between matrix products read and write, likewise.
        gather_s: seconds per optimizer step that wait for the layers of a sharded target.
        update_s: seconds per optimizer step to reduce gradients, send weights and run the optimizer.
        times: of the parts of a validation.
        num_examples: of an epoch; None if the data were not opened.
        balance: padding and balance of the data; None if the data were not opened.
        change: overrides that make the run fit; None if it fits as it is, or if none do.
    """

    accumulation: int
    memory: dict[str, float] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    traffic: dict[str, float] = field(default_factory=dict)
    gather_s: float = 0.0
    update_s: float = 0.0
    validation_bytes: float = 0.0
    times: PassTimes | None = None
    num_examples: int | None = None
    balance: Balance | None = None
    change: list[str] | None = None

    @property
    def total_bytes(self) -> float:
        """Bytes of training, or of a validation, which starts when the working memory of a step is free."""
        states = sum(amount for part, amount in self.memory.items() if part not in WORKING)
        return max(sum(self.memory.values()), states + self.validation_bytes)

    @property
    def limit_bytes(self) -> float:
        return self.config.launch.gpu_memory_gb * 1e9

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.limit_bytes

    @property
    def is_tight(self) -> bool:
        """Whether a run that fits has less to spare than estimates are exact."""
        return self.limit_bytes - self.total_bytes < TIGHT * self.limit_bytes

    def part_s(self, part: str) -> float:
        """Returns the seconds of a part of the step: its operations and its traffic, divided over all ranks."""
        return (self.flops[part] / self.flops_per_s + self.traffic[part] / self.bytes_per_s) / self.ranks

    @property
    def parts_s(self) -> float:
        """Seconds of all parts."""
        return sum(map(self.part_s, self.flops))

    @property
    def floor_s(self) -> float:
        """Seconds per optimizer step of the operations alone, its lower bound."""
        return sum(self.flops.values()) / self.flops_per_s / self.ranks

    @property
    def step_s(self) -> float:
        """Seconds per optimizer step of the longest examples."""
        return self.parts_s + self.gather_s + self.update_s

    @property
    def data_step_s(self) -> float | None:
        """Seconds per optimizer step of the actual data, with padding and with waiting for the slowest rank."""
        if self.balance is None:
            return None
        share = self.balance.mean_tokens / self.length / self.balance.efficiency
        return self.parts_s * share + self.gather_s + self.update_s

    @property
    def training_s(self) -> float | None:
        """Seconds of all optimizer steps; None if their number depends on the size of the data."""
        return None if self.num_steps is None else self.num_steps * (self.data_step_s or self.step_s)

    @property
    def num_steps(self) -> int | None:
        """Optimizer steps of the run; None if they depend on the size of the data."""
        train, examples = self.config.train, self.num_examples or self.config.data.num_examples
        if not examples and train.max_steps is None and train.max_minutes is None:
            return None
        length = run_length(self.config, examples / train.global_batch_size if examples else None)
        expected = length.expected_steps(1, self.data_step_s or self.step_s)
        return None if math.isinf(expected) else math.ceil(expected)

    @property
    def num_validations(self) -> int | None:
        """Validations of the run, the one at its end included; None if they depend on the size of the data."""
        every, steps = self.config.train.validate_every, self.num_steps
        if not every:
            return 1
        return None if steps is None else math.ceil(steps / every)

    @property
    def validation_s(self) -> float:
        """Seconds of one validation."""
        assert self.times is not None
        return validation_s(self.config.decode, self.times)

    @property
    def validation_share(self) -> float | None:
        """Share of the run that validations take; None if it depends on the size of the data."""
        return self._share(self.validation_s)

    def smaller_validation(self) -> tuple[list[str], float] | None:
        """Returns the mildest overrides with which validations take at most a tenth of the run, and the seconds of one; rarer
        validations only if all others are not enough. None if the share is not above a tenth or not known, or if all
        validations together take less than a minute.
        """
        total_s = self.validation_s * (self.num_validations or 0)
        if (self.validation_share or 0) <= MAX_SHARE or total_s < MIN_VALIDATIONS_S:
            return None
        assert self.times is not None and self.training_s is not None and self.num_steps is not None
        words, each_s = list[str](), self.validation_s
        for words, decode in smaller_settings(self.config.decode, self.config.score.policy):
            each_s = validation_s(decode, self.times)
            if (self._share(each_s) or 0) <= MAX_SHARE:
                return words, each_s
        number = int(self.training_s * MAX_SHARE / (1 - MAX_SHARE) / each_s)
        every = math.ceil(self.num_steps / number) if number > 1 else 0
        return [*words, f"train.validate_every={every}"], each_s

    def _share(self, each_s: float) -> float | None:
        if self.training_s is None or self.num_validations is None:
            return None
        total_s = each_s * self.num_validations
        return total_s / (total_s + self.training_s)


def estimate(config: Config, models: MetaModels, ranks: int, extent: Extent | None = None) -> LaunchPlan:
    """Returns the plan of a run as it is; ConfigError if the global batch cannot be split evenly over the ranks.

    Args:
        extent: of the data; None if they are not known.
    """
    length = Workload(config=config, models=models, ranks=ranks, extent=extent).length
    _, accumulation = split_of_length(config, ranks, length)
    plan = LaunchPlan(config=config, models=models, ranks=ranks, extent=extent, accumulation=accumulation)
    plan = replace(plan, flops=flops_of_step(plan), traffic=bytes_of_step(plan), memory=memory_per_gpu(plan))
    plan = replace(plan, validation_bytes=validation_memory(plan))
    gather_s = transfer_s(plan, plan.layers_bytes, plan.sharding_ranks) if config.deepspeed.shard_target else 0.0
    exposed = exposed_s(gather_s, plan.part_s("text") / accumulation, models.target.num_layers)
    forward_s = (plan.part_s("vision") + plan.part_s("text")) * ranks / config.train.global_batch_size
    times = pass_times(plan, forward_s, gather_s)
    return replace(plan, gather_s=accumulation * exposed, update_s=update_s(plan, accumulation), times=times)


# -- validations -------------------------------------------------------------------------------------------------------


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

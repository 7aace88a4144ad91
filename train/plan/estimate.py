"""The estimate of a run: memory per GPU (see train.plan.memory), operations and time of an optimizer step, validations.

docs/plan.md has the formula of every figure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from train.config.checks import split_of_length
from train.config.run_length import total_steps
from train.config.schema import Config
from train.plan.balance import Balance
from train.plan.memory import Workload, draft_rows, memory_per_gpu
from train.plan.meta import MetaModels
from train.plan.validation_time import MAX_SHARE, MIN_VALIDATIONS_S, PassTimes, pass_times, smaller_settings, validation_s

NVLINK_BYTES_PER_S = 100e9  # received by a rank when it gathers a sharded target
NETWORK_BYTES_PER_S = 50e9  # received by a node: one adapter of 400 Gbit/s
BACKWARD = 2  # forward passes that a backward pass costs


@dataclass(frozen=True, kw_only=True)
class LaunchPlan(Workload):
    """The needs of a run.

    Attributes:
        accumulation: micro-batches per rank and optimizer step.
        memory: bytes per GPU by component.
        flops: floating-point operations of an optimizer step over all ranks, by component, for the longest examples.
        gather_s: seconds per optimizer step to gather a sharded target.
        times: of the parts of a validation.
        num_examples: of an epoch; None if the data were not opened.
        balance: padding and balance of the data; None if the data were not opened.
        change: overrides that make the run fit; None if it fits as it is, or if none do.
    """

    accumulation: int
    memory: dict[str, float] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    gather_s: float = 0.0
    times: PassTimes | None = None
    num_examples: int | None = None
    balance: Balance | None = None
    change: list[str] | None = None

    @property
    def total_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def limit_bytes(self) -> float:
        return self.config.launch.gpu_memory_gb * 1e9

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.limit_bytes

    def seconds(self, flops: float) -> float:
        """Returns the seconds of operations that are divided over all ranks."""
        return flops / (self.ranks * self.config.launch.gpu_tflops * 1e12)

    @property
    def step_s(self) -> float:
        """Seconds per optimizer step of the longest examples."""
        return self.seconds(sum(self.flops.values())) + self.gather_s

    @property
    def data_step_s(self) -> float | None:
        """Seconds per optimizer step of the actual data, with padding and with waiting for the slowest rank."""
        if self.balance is None:
            return None
        share = self.balance.mean_tokens / self.length / self.balance.efficiency
        return self.seconds(sum(self.flops.values())) * share + self.gather_s

    @property
    def training_s(self) -> float | None:
        """Seconds of all optimizer steps; None if their number depends on the size of the data."""
        return None if self.num_steps is None else self.num_steps * (self.data_step_s or self.step_s)

    @property
    def num_steps(self) -> int | None:
        """Optimizer steps of the run; None if they depend on the size of the data."""
        train, examples = self.config.train, self.num_examples or self.config.data.num_examples
        return total_steps(self.config, examples / train.global_batch_size) if examples else train.max_steps

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


def estimate(config: Config, models: MetaModels, ranks: int) -> LaunchPlan:
    """Returns the plan of a run as it is; ConfigError if the global batch cannot be split evenly over the ranks."""
    length = Workload(config=config, models=models, ranks=ranks).length
    _, accumulation = split_of_length(config, ranks, length)
    plan = LaunchPlan(config=config, models=models, ranks=ranks, accumulation=accumulation)
    gather_s = gather_s_per_pass(plan) if config.deepspeed.shard_target else 0.0
    flops = flops_of_step(plan)
    forward = (flops["vision"] + flops["text"]) / config.train.global_batch_size
    times = pass_times(plan, forward / (config.launch.gpu_tflops * 1e12), gather_s)
    return replace(plan, memory=memory_per_gpu(plan), flops=flops, gather_s=plan.accumulation * gather_s, times=times)


def gather_s_per_pass(work: Workload) -> float:
    """Returns the seconds in which a rank receives the layers that it does not hold, the slower of NVLink and network."""
    group, nodes = work.sharding_ranks, math.ceil(work.sharding_ranks / work.ranks_per_node)
    within, between = (work.layers_bytes * (parts - 1) / parts for parts in (group, nodes))
    return max(within / NVLINK_BYTES_PER_S, between / NETWORK_BYTES_PER_S)


def flops_of_step(work: Workload) -> dict[str, float]:
    """Returns floating-point operations of one optimizer step over all ranks: of vision, text, draft, objective."""
    config, models, target = work.config, work.models, work.models.target
    tokens, steps = config.train.global_batch_size * work.length, config.objective.steps
    own_head = models.draft.has_own_lm_head * work.draft_vocab_size * target.hidden_size  # read at supervised positions only
    attention = 2 * work.length * target.hidden_size * target.num_layers  # causal: half of the pairs, QK and AV
    logits = 2 * work.draft_vocab_size * target.hidden_size * tokens * (1 - work.visual_share)
    rows = draft_rows(models.draft.network, work.length, work.num_visual) / work.length
    rows += (steps - 1) * min(rows, 1 - work.visual_share)  # later steps draft from text alone
    return {
        "vision": 2 * models.vision_parameters * tokens * work.visual_share * work.patches_per_token,
        "text": (2 * models.text_parameters + attention) * tokens,
        "draft": 2 * (models.draft_parameters - own_head) * tokens * rows * (1 + BACKWARD),
        # the target's logits once; at each step those of the draft, the gradient back through its lm_head and of an own lm_head
        "objective": logits * (1 + (2 + models.draft.has_own_lm_head) * steps),
    }

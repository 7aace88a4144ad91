"""The estimate of a run: memory per GPU (see train.plan.memory), operations and time of an optimizer step, number of steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from train.config.checks import split_of_length
from train.config.run_length import total_steps
from train.config.schema import Config
from train.plan.memory import BYTES, Workload, draft_rows, memory_per_gpu
from train.plan.meta import MetaModels

GATHER_BYTES_PER_S = 100e9  # received by a rank when it gathers a sharded target over NVLink; far less over a network
BACKWARD = 2  # forward passes that a backward pass costs


@dataclass(frozen=True, kw_only=True)
class LaunchPlan(Workload):
    """The needs of a run.

    Attributes:
        accumulation: micro-batches per rank and optimizer step.
        memory: bytes per GPU by component.
        flops: floating-point operations of an optimizer step over all ranks, by component.
        gather_s: seconds per optimizer step to gather a sharded target.
        num_examples: of an epoch; None if the data were not opened.
        change: overrides that make the run fit; None if it fits as it is, or if none do.
    """

    accumulation: int
    memory: dict[str, float] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    gather_s: float = 0.0
    num_examples: int | None = None
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

    @property
    def step_s(self) -> float:
        """Seconds per optimizer step."""
        return sum(self.flops.values()) / (self.ranks * self.config.launch.gpu_tflops * 1e12) + self.gather_s

    @property
    def num_steps(self) -> int | None:
        """Optimizer steps of the run; None if they depend on the size of the data."""
        train, examples = self.config.train, self.num_examples or self.config.data.num_examples
        return total_steps(self.config, examples / train.global_batch_size) if examples else train.max_steps


def estimate(config: Config, models: MetaModels, ranks: int) -> LaunchPlan:
    """Returns the plan of a run as it is; ConfigError if the global batch cannot be split evenly over the ranks."""
    length = Workload(config=config, models=models, ranks=ranks).length
    _, accumulation = split_of_length(config, ranks, length)
    plan = LaunchPlan(config=config, models=models, ranks=ranks, accumulation=accumulation)
    gather_s = 0.0
    if config.deepspeed.shard_target:
        received = models.layers_parameters * BYTES[config.target.dtype] * (ranks - 1) / ranks
        gather_s = plan.accumulation * received / GATHER_BYTES_PER_S
    return replace(plan, memory=memory_per_gpu(plan), flops=_flops(plan), gather_s=gather_s)


def _flops(work: Workload) -> dict[str, float]:
    """Floating-point operations of one optimizer step over all ranks."""
    config, models, target = work.config, work.models, work.models.target
    tokens, steps = config.train.global_batch_size * work.length, config.objective.steps
    text = models.active_parameters - models.vision_parameters - target.vocab_size * target.hidden_size
    attention = 2 * work.length * target.hidden_size * target.num_layers  # causal: half of the pairs, QK and AV
    logits = 2 * work.draft_vocab_size * target.hidden_size * tokens * (1 - work.visual_share)
    rows = draft_rows(models.draft.network, work.length, work.num_visual) / work.length
    return {
        "vision": 2 * models.vision_parameters * tokens * work.visual_share * work.patches_per_token,
        "text": (2 * text + attention) * tokens,
        "draft": 2 * models.draft_parameters * tokens * rows * steps * (1 + BACKWARD),
        # the target's logits once; at each step those of the draft, the gradient back through its lm_head and of an own lm_head
        "objective": logits * (1 + (2 + models.draft.has_own_lm_head) * steps),
    }

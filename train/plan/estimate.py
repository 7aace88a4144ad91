"""The plan of a run: memory per GPU, an optimizer step, validations, and the smallest change that makes it fit into memory.

docs/plan.md has the formula of every figure; train.plan.memory and train.plan.step_time compute those of a step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sage.bench.measurement import WARMUP_TOKENS
from sage.trees import AUTOREGRESSIVE
from train.config.checks import MAX_STAGE, check_deepspeed
from train.config.derived import run_length, split_of_length
from train.config.schema import Config, ConfigError, DecodeConfig, Offload, PolicyName, ShardOver, ValidateOn
from train.plan.data import DataPlan
from train.plan.memory import BYTES, WORKING, Extent, Workload, memory_per_gpu, validation_memory
from train.plan.meta import MetaModels, build_on_meta
from train.plan.step_time import bytes_of_step, exposed_s, flops_of_step, transfer_s, update_s

TOKENS_PER_PASS = 3.0  # that a policy which drafts is assumed to reach
DRAFTING = 0.3  # share of the time of a target pass that a round needs beside it
CALLS_PER_LAYER, CALL_S = 60, 6e-6  # of an eager pass, in which Hugging Face decodes
MAX_SHARE = 0.1  # of the run
MIN_VALIDATIONS_S = 60  # of all validations of a run; if they take less, their share does not matter
MIN_PROMPTS = 4
MAX_GPUS = 64
LEAST_TOKENS = 512  # of a budget for micro-batches


@dataclass(kw_only=True)
class LaunchPlan(Workload):
    """The needs of a run.

    Attributes:
        accumulation: micro-batches per rank and optimizer step.
        data: of the run; None in a plan without them.
        change: overrides that make the run fit; None if it fits as it is, or if none do.
        memory: bytes per GPU of a training step by component.
        validation_bytes: bytes per GPU that a validation takes beside states and target, and frees at its end.
        total_bytes: of training, or of a validation, which starts when the working memory of a step is free.
        flops: floating-point operations of an optimizer step over all ranks, by part, for the longest examples.
        traffic: bytes that operators between matrix products read and write, likewise.
        parts_s: seconds of each part of the step: its operations and its traffic, divided over all ranks.
        floor_s, step_s: seconds per optimizer step of the operations alone, its lower bound; and of the longest examples.
        gather_s: seconds per optimizer step that wait for the layers of a sharded target, all of which take `pass_gather_s`.
        update_s: seconds per optimizer step to reduce gradients, send weights and run the optimizer.
        balance: padding and balance of the data; None if they were not opened.
        data_step_s: seconds per optimizer step of the actual data, with padding and with waiting for the slowest rank.
        num_steps, training_s: optimizer steps of the run and their seconds; None if they depend on the size of the data.
        num_validations: of the run, the one at its end included; None if they depend on the size of the data.
        validating_ranks: that decode, each a part of the prompts.
        validation_s, validation_share: seconds of one validation; share of the run that all of them take, None if unknown.
    """

    accumulation: int
    data: DataPlan | None = None
    change: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        config, target = self.config, self.models.target
        self.memory, self.validation_bytes = memory_per_gpu(self), validation_memory(self)
        states = sum(amount for part, amount in self.memory.items() if part not in WORKING)
        self.total_bytes = max(sum(self.memory.values()), states + self.validation_bytes)
        self.flops, self.traffic = flops_of_step(self), bytes_of_step(self)
        self.parts_s = {
            part: (amount / self.flops_per_s + self.traffic[part] / self.bytes_per_s) / self.ranks
            for part, amount in self.flops.items()
        }
        is_sharded, accumulation = config.deepspeed.shard_target, self.accumulation
        self.pass_gather_s = transfer_s(self, self.layers_bytes, self.sharding_ranks) if is_sharded else 0.0
        self.gather_s = accumulation * exposed_s(self.pass_gather_s, self.parts_s["text"] / accumulation, target.num_layers)
        self.update_s = update_s(self, accumulation)
        self.floor_s = sum(self.flops.values()) / self.flops_per_s / self.ranks
        self.step_s = self.data_step_s = sum(self.parts_s.values()) + self.gather_s + self.update_s
        self.balance = self.data.balance if self.data else None
        if self.balance is not None:
            share = self.balance.mean_tokens / self.length / self.balance.efficiency
            self.data_step_s = sum(self.parts_s.values()) * share + self.gather_s + self.update_s
        self.num_steps = self._num_steps()
        self.training_s = None if self.num_steps is None else self.num_steps * self.data_step_s
        every = config.train.validate_every
        self.num_validations = 1 if not every else None if self.num_steps is None else math.ceil(self.num_steps / every)
        self.validating_ranks = 1 if is_sharded or config.train.validate_on is ValidateOn.main else self.ranks
        self.validation_s = self._validation_s(config.decode)
        self.validation_share = self._share(self.validation_s)

    @property
    def limit_bytes(self) -> float:
        return self.config.launch.gpu_memory_gb * 1e9

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.limit_bytes

    def _num_steps(self) -> int | None:
        train, examples = self.config.train, (self.data and self.data.num_examples) or self.config.data.num_examples
        if not examples and train.max_steps is None and train.max_minutes is None:
            return None
        length = run_length(self.config, examples / train.global_batch_size if examples else None)
        expected = length.expected_steps(1, self.data_step_s)
        return None if math.isinf(expected) else math.ceil(expected)

    def _validation_s(self, decode: DecodeConfig) -> float:
        """Returns the seconds of a validation whose answers all have `decode.max_new_tokens` tokens."""
        answers = math.ceil(decode.num_prompts / self.validating_ranks) * decode.repeats
        short = min(decode.max_new_tokens, WARMUP_TOKENS)
        return answers * self._answers_s(decode, decode.max_new_tokens) + decode.warmup * self._answers_s(decode, short)

    def _answers_s(self, decode: DecodeConfig, tokens: int) -> float:
        """Returns the seconds of one answer by every decoder."""
        drafting = sum(name != AUTOREGRESSIVE for name in decode.policies)
        gather_s, batch = self.pass_gather_s, self.config.train.global_batch_size
        prefill_s = (self.parts_s["vision"] + self.parts_s["text"]) * self.ranks / batch + gather_s  # of the longest example
        weights_s = self.models.read_parameters * BYTES[self.config.target.dtype] / self.bytes_per_s  # of reading them once
        calls_s = self.models.target.num_layers * CALLS_PER_LAYER * CALL_S
        eager_s = max(weights_s, calls_s) + gather_s
        round_s = (1 + DRAFTING) * weights_s + gather_s
        per_token_s = weights_s + gather_s + len(decode.baselines) * eager_s + drafting * round_s / TOKENS_PER_PASS
        return (1 + drafting + len(decode.baselines)) * prefill_s + (tokens - 1) * per_token_s  # the prefill yields one token

    def smaller_validation(self) -> tuple[list[str], float] | None:
        """Returns the mildest overrides with which validations take at most a tenth of the run, and the seconds of one; rarer
        validations only if all others are not enough. None if the share is not above a tenth or not known, or if all
        validations together take less than a minute.
        """
        total_s = self.validation_s * (self.num_validations or 0)
        if (self.validation_share or 0) <= MAX_SHARE or total_s < MIN_VALIDATIONS_S:
            return None
        assert self.training_s is not None and self.num_steps is not None
        words, each_s = list[str](), self.validation_s
        for words, decode in _smaller_settings(self.config.decode, self.config.score.policy):
            each_s = self._validation_s(decode)
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


def plan(config: Config, data: DataPlan | None = None) -> LaunchPlan:
    """Returns the plan of a run, with a change that makes it fit if it does not."""
    ranks = config.launch.gpus or config.launch.ranks or 1
    current = estimate(config, build_on_meta(config), ranks, data.extent if data else None)
    return replace(current, data=data, change=None if current.fits else find_change(current))


def estimate(config: Config, models: MetaModels, ranks: int, extent: Extent | None = None) -> LaunchPlan:
    """Returns the plan of a run as it is; ConfigError if the global batch cannot be split evenly over the ranks."""
    length = Workload(config=config, models=models, ranks=ranks, extent=extent).length
    _, accumulation = split_of_length(config, ranks, length)
    return LaunchPlan(config=config, models=models, ranks=ranks, extent=extent, accumulation=accumulation)


def _smaller_settings(decode: DecodeConfig, score: PolicyName | None) -> Iterator[tuple[list[str], DecodeConfig]]:
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


# -- a change that makes it fit -------------------------------------------------------------------------------------------


Change = tuple[str, Any]  # the key of a setting, and another value of it


def find_change(current: LaunchPlan) -> list[str] | None:
    """Returns the fewest overrides that make the run fit, the mildest first; None if no combination does."""
    kinds = _changes(current.config, current.ranks)
    *settings, gpus = kinds
    strongest = [kind[-1] for kind in settings]
    if not any(_fits(current, [*strongest, *more]) for more in [[], *([number] for number in gpus)]):
        return None  # not even with all changes together, allowed or not
    for number in range(1, len(kinds) + 1):
        for chosen in itertools.combinations(kinds, number):
            for changes in itertools.product(*chosen):
                if _fits(current, changes, is_checked=True):
                    return [_override(*change) for change in changes]
    return None


def _changes(config: Config, ranks: int) -> list[list[Change]]:
    """Changes that do not alter the result of the training, each kind from mild to strong; the number of GPUs last."""
    train, deepspeed = config.train, config.deepspeed
    batch = "micro_batch_size" if train.micro_batch_tokens is None else "micro_batch_tokens"
    least = 1 if train.micro_batch_tokens is None else LEAST_TOKENS
    is_over_nodes = deepspeed.shard_over is not ShardOver.world and ranks > config.launch.gpus_per_node
    is_offloaded = not deepspeed.stage or deepspeed.offload_optimizer is not Offload.none
    kinds: list[list[Change]] = [
        [("objective.chunk_tokens", size) for size in _halves(config.objective.chunk_tokens, 128)],
        [(f"train.{batch}", size) for size in _halves(getattr(train, batch), least)],
        [("deepspeed.stage", stage) for stage in range(deepspeed.stage + 1, MAX_STAGE + 1)],
        [] if deepspeed.shard_target else [("deepspeed.shard_target", True)],
        [("deepspeed.shard_over", ShardOver.world)] if is_over_nodes else [],
        [] if is_offloaded else [("deepspeed.offload_optimizer", Offload.cpu)],
    ]
    doubles = itertools.takewhile(lambda more: more <= MAX_GPUS, (ranks << power for power in itertools.count(1)))
    return [*(kind for kind in kinds if kind), [("launch.gpus", more) for more in doubles]]


def _halves(value: int, lowest: int) -> Iterator[int]:
    """Yields value / 2, value / 4, ... down to `lowest`."""
    while value // 2 >= lowest:
        value //= 2
        yield value


def _override(key: str, value: Any) -> str:
    if key == "deepspeed.stage":
        return f"deepspeed=zero{value}"
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _fits(current: LaunchPlan, changes: Sequence[Change], is_checked: bool = False) -> bool:
    """Whether the run would fit with these changes; with `is_checked`, also whether they are allowed."""
    config, ranks = current.config, current.ranks
    for key, value in changes:
        group, _, name = key.partition(".")
        if group == "launch":
            ranks = value
        else:
            config = replace(config, **{group: replace(getattr(config, group), **{name: value})})
    try:
        if is_checked:
            check_deepspeed(config, ranks)
        return estimate(config, current.models, ranks, current.extent).fits
    except ConfigError:  # or the batch cannot be split over so many ranks
        return False

"""The plan of a run: memory per GPU, an optimizer step, validations, and the smallest change that makes it fit into memory.

docs/plan.md has the formula of every figure. Matrix products are counted as operations, everything between them as bytes, since
each operator reads and writes memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sage.bench.measurement import WARMUP_TOKENS
from sage.runtime.modes import VisionAttention
from sage.trees import AUTOREGRESSIVE
from train.config.checks import MAX_STAGE, check_deepspeed
from train.config.derived import MAX_NEW_TOKENS, NUM_PROMPTS, run_length, scored_policy, split_of_length, zero_stage
from train.config.schema import Config, ConfigError, DecodeConfig, Offload, PolicyName, Precision, ShardOver, ValidateOn
from train.distill.compiled_layers import is_compiling
from train.engine.optimizers import ITERATIONS
from train.plan.data import DataPlan
from train.plan.memory import (
    BYTES,
    MASTER_BYTES,
    WORKING,
    Workload,
    build_on_meta,
    draft_layers,
    draft_rows,
    memory_per_gpu,
    validation_memory,
)

TOKENS_PER_PASS = 3.0  # that a policy which drafts is assumed to reach
DRAFTING = 0.3  # share of the time of a target pass that a round needs beside it
CALLS_PER_LAYER, CALL_S = 60, 6e-6  # of an eager pass, in which Hugging Face decodes
MAX_SHARE = 0.1  # of the run
MIN_VALIDATIONS_S = 60  # of all validations of a run; if they take less, their share does not matter
MAX_GPUS = 64
LEAST_TOKENS = 512  # of a budget for micro-batches
NVLINK_BYTES_PER_S = 100e9  # received by a rank
NETWORK_BYTES_PER_S = 50e9  # received by a node: one adapter of 400 Gbit/s
BACKWARD = 2  # forward passes that a backward pass costs
ADAMW_BYTES = 3 * 2 * MASTER_BYTES + MASTER_BYTES  # of a parameter: weight and moments, read and written; the gradient
IN_CALLS = (VisionAttention.eager, VisionAttention.sdpa)  # attention of packed images with one call per image and window
SUM_BYTES = 2 * MASTER_BYTES  # of an entry of a sum of gradients, read and written


@dataclass(kw_only=True)
class LaunchPlan(Workload):
    """The needs of a run: bytes per GPU, and seconds per optimizer step of the longest examples and of the actual data.

    ConfigError if the global batch cannot be split evenly over the ranks.

    Attributes:
        accumulation: micro-batches per rank and optimizer step.
        change: overrides that make the run fit; None if it fits as it is, or if none do.
        validation_bytes: that a validation takes beside states and target, when the working memory of a step is free.
        parts_s: seconds of each part of the step: its operations (`flops`) and its bytes (`traffic`), over all ranks.
        gather_s: seconds that wait for the layers of a sharded target, all of which take `pass_gather_s`.
        floor_s, step_s, data_step_s: seconds of the operations alone; of the longest examples; of the actual data.
        num_steps, num_validations, validation_share: None if they depend on the size of the data.
    """

    data: DataPlan | None = None
    change: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        config, target = self.config, self.models.target
        _, self.accumulation = split_of_length(config, self.ranks, self.length)
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
        # Each layer is gathered while the one before it runs: a pass waits for the first one, and for what takes longer than
        # running.
        excess_s = max(0.0, self.pass_gather_s - self.parts_s["text"] / accumulation)
        waited_s = (self.pass_gather_s + (target.num_layers - 1) * excess_s) / target.num_layers
        self.gather_s = accumulation * waited_s
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
        """Returns the mildest overrides with which validations take at most a tenth of the run, and the seconds of one.

        Rarer validations only if smaller ones are not enough. None if the share is not above a tenth or not known, or if all
        validations together take less than a minute.
        """
        total_s = self.validation_s * (self.num_validations or 0)
        if (self.validation_share or 0) <= MAX_SHARE or total_s < MIN_VALIDATIONS_S:
            return None
        assert self.training_s is not None and self.num_steps is not None
        decode, each_s, changed = self.config.decode, self.validation_s, dict[str, Any]()
        for key, value in _smaller_settings(decode, scored_policy(self.config)):
            decode = replace(decode, **{key: value})
            changed[f"decode.{key}"] = f"[{','.join(value)}]" if isinstance(value, list) else value
            each_s = self._validation_s(decode)
            if (self._share(each_s) or 0) <= MAX_SHARE:
                break
        else:
            number = int(self.training_s * MAX_SHARE / (1 - MAX_SHARE) / each_s)
            changed["train.validate_every"] = math.ceil(self.num_steps / number) if number > 1 else 0
        return [f"{key}={value}" for key, value in changed.items()], each_s

    def _share(self, each_s: float) -> float | None:
        if self.training_s is None or self.num_validations is None:
            return None
        total_s = each_s * self.num_validations
        return total_s / (total_s + self.training_s)


def plan(config: Config, data: DataPlan | None = None) -> LaunchPlan:
    """Returns the plan of a run, with a change that makes it fit if it does not."""
    ranks = config.launch.gpus or config.launch.ranks or 1
    extent = data.extent if data else None
    current = LaunchPlan(config=config, models=build_on_meta(config), ranks=ranks, extent=extent, data=data)
    return current if current.fits else replace(current, change=find_change(current))


def _smaller_settings(decode: DecodeConfig, scored: PolicyName) -> Iterator[tuple[str, Any]]:
    """Yields settings that make a validation faster, the mildest first."""
    yield from (("num_prompts", count) for count in _halves(decode.num_prompts, NUM_PROMPTS))
    if decode.baselines:
        yield "baselines", []
    if decode.policies != [scored]:
        yield "policies", [scored]
    if decode.max_new_tokens > MAX_NEW_TOKENS:
        yield "max_new_tokens", MAX_NEW_TOKENS


# -- a change that makes it fit -------------------------------------------------------------------------------------------


Change = tuple[str, Any]  # the key of a setting, and another value of it


def find_change(current: LaunchPlan) -> list[str] | None:
    """Returns the fewest overrides that make the run fit, the mildest first; None if no combination does."""
    kinds = _changes(current.config, current.ranks)
    *settings, gpus = kinds
    strongest = [kind[-1] for kind in settings]
    if not any(_fits(current, [*strongest, *more]) for more in ((), *((number,) for number in gpus))):
        return None  # not even with all changes together, allowed or not
    for number in range(1, len(kinds) + 1):
        for chosen in itertools.combinations(kinds, number):
            for changes in itertools.product(*chosen):
                if _fits(current, changes, is_checked=True):
                    words = (f"{key}={str(value).lower()}" for key, value in changes)
                    return [word.replace("deepspeed.stage=", "deepspeed=zero") for word in words]
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
        [] if deepspeed.shard_target or config.target.quantize else [("deepspeed.shard_target", True)],
        [("deepspeed.shard_over", ShardOver.world)] if is_over_nodes else [],
        [] if is_offloaded else [("deepspeed.offload_optimizer", Offload.cpu)],
    ]
    doubles = itertools.takewhile(lambda more: more <= MAX_GPUS, (ranks << power for power in itertools.count(1)))
    return [*(kind for kind in kinds if kind), [("launch.gpus", more) for more in doubles]]


def _halves(value: int, lowest: int) -> Iterator[int]:
    while value // 2 >= lowest:
        value //= 2
        yield value


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
        return LaunchPlan(config=config, models=current.models, ranks=ranks, extent=current.extent).fits
    except ConfigError:  # or the batch cannot be split over so many ranks
        return False


# -- operations, memory traffic and communication of an optimizer step, for the longest examples --------------------------


def flops_of_step(work: Workload) -> dict[str, float]:
    """Returns floating-point operations of matrix products over all ranks: of vision, text, draft, objective."""
    models, target = work.models, work.models.target
    tokens = work.config.train.global_batch_size * work.length
    own_head = models.draft.has_own_lm_head * work.draft_vocab_size * target.hidden_size  # read at supervised positions only
    attention = 2 * work.length * target.hidden_size * target.num_layers  # causal: half of the pairs, QK and AV
    rows, context_rows = _draft_rows(work)
    read = (models.draft_parameters - own_head) * rows + models.context_parameters * context_rows
    # logits of the target once for each position with a prediction; for each prediction those of the draft, the gradient back
    # through its lm_head and that of an own lm_head
    logits = _compared_share(work) + (2 + models.draft.has_own_lm_head) * work.drafted_share * work.steps
    return {
        "vision": 2 * models.vision_parameters * tokens * work.visual_share * work.patches_per_token,
        "text": (2 * models.text_parameters + attention) * tokens,
        "draft": 2 * read * tokens * (1 + BACKWARD),
        "objective": 2 * work.draft_vocab_size * target.hidden_size * tokens * logits,
    }


def bytes_of_step(work: Workload) -> dict[str, float]:
    """Returns bytes that operators between matrix products read and write over all ranks, by the same parts."""
    config, target, draft = work.config, work.models.target, work.models.draft.network
    tokens = config.train.global_batch_size * work.length
    frozen, trained = BYTES[config.target.dtype], BYTES[config.train.precision]
    text, patches = target.text_config, tokens * work.visual_share * work.patches_per_token
    heads = (text.num_attention_heads + target.num_kv_heads) * target.head_dim
    width, mlp_width, _ = target.family.vision_sizes
    compiled = compiled_parts(work)
    shape = draft_layers(draft)
    predicted = work.steps * work.drafted_share
    passes = config.train.global_batch_size / work.micro_batch_size
    chunks = math.ceil(predicted * work.micro_batch_tokens / config.objective.chunk_tokens)
    head_sum = passes * chunks * SUM_BYTES * work.draft_vocab_size * target.hidden_size
    layers = {
        "vision": (width, mlp_width, 2 * width, frozen),
        "text": (target.hidden_size, target.family.mlp_width, heads, frozen),
        "draft": (shape.sizes.hidden_size, shape.sizes.intermediate_size, shape.queries + shape.keys, trained),
    }
    rows = {
        "vision": int(getattr(work.vision, "depth", getattr(work.vision, "num_hidden_layers", 0))) * patches,
        "text": target.num_layers * tokens,
        "draft": shape.depth * tokens * _draft_rows(work)[0] * (1 + BACKWARD),
    }
    traffic = {part: layer_bytes(*layer, part in compiled) * rows[part] for part, layer in layers.items()}
    logits = work.draft_vocab_size * tokens * (46 * _compared_share(work) + 68 * predicted)
    return traffic | {"objective": logits + work.models.draft.has_own_lm_head * head_sum}


def layer_bytes(width: int, mlp_width: int, heads: int, size: int, is_compiled: bool) -> float:
    """Returns bytes that a layer reads and writes per row between its products, for elements of `size` bytes.

    Two RMS norms, two residual sums, rope of all heads of queries and keys, and a gated MLP's activation. Compiled, each of
    them reads its operands and writes its result once; else norms are in float32, rope has four operators, the MLP's two.
    """
    if is_compiled:
        return size * (10 * width + 2 * heads + 3 * mlp_width)
    norms = 2 * (4 * size + 7 * 4) * width
    return norms + 2 * 3 * size * width + 10 * size * heads + 5 * size * mlp_width


def compiled_parts(work: Workload) -> set[str]:
    """Returns the parts whose layers are compiled on a GPU (`train.compile`)."""
    config, family = work.config, work.models.target.family
    if not is_compiling(config, torch.device("cuda")):
        return set()
    in_calls = family.is_packed and (config.target.attention in IN_CALLS or config.target.dtype is Precision.fp32)
    is_eager = {"vision": in_calls, "text": config.deepspeed.shard_target, "draft": zero_stage(config) == MAX_STAGE}
    return {part for part, eager in is_eager.items() if not eager}


def _draft_rows(work: Workload) -> tuple[float, float]:
    """Returns the rows per token of the draft's layers over all unrolled steps, and rows that only have keys and values."""
    rows = draft_rows(work.models.draft.network, work.length, work.num_visual) / work.length
    drafted = min(rows, work.drafted_share)
    if work.config.objective.anchors is not None:
        return work.steps * drafted, rows - drafted
    return rows + (work.steps - 1) * drafted, 0.0  # later steps draft from text alone


def _compared_share(work: Workload) -> float:
    """Returns the positions, per token, whose tokens some draft predicts."""
    return min(work.supervised_share, work.drafted_share * work.steps)


def transfer_s(work: Workload, size: float, group: int) -> float:
    """Returns the seconds in which each rank of a group receives what it lacks of `size` bytes, which the group holds once."""
    nodes = math.ceil(group / work.ranks_per_node)
    within, between = (size * (parts - 1) / parts for parts in (group, nodes))
    return max(within / NVLINK_BYTES_PER_S, between / NETWORK_BYTES_PER_S)


def update_s(work: Workload, accumulation: int) -> float:
    """Returns the seconds of reducing the draft's gradients in float32, sending its weights, and the optimizer, one by one."""
    config, trained = work.config, work.models.trained_parameters
    stage = zero_stage(config)
    reduced = trained * MASTER_BYTES * (accumulation if stage > 1 else 1)
    if stage == 0:
        reduced *= 2  # every rank receives all sums
    weights = trained * BYTES[config.train.precision] * (2 * accumulation if stage == MAX_STAGE else min(stage, 1))
    shares = work.ranks if stage else 1
    moved_s = transfer_s(work, reduced + weights, work.ranks) + trained * ADAMW_BYTES / shares / work.bytes_per_s
    # Muon puts its matrices together in float32. An iteration takes two products of M x M with M x N and one of M x M with
    # itself, M being the smaller side.
    matrices = work.models.muon_matrices(config)
    gathered = 2 * MASTER_BYTES * sum(rows * columns for rows, columns in matrices) * (stage > 0)  # a sum, sent to all
    flops = ITERATIONS * sum(4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3 for shape in matrices)
    return moved_s + transfer_s(work, gathered, work.ranks) + flops / shares / work.flops_per_s

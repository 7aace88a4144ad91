"""What follows from a configuration: length of the run, division of a step, ZeRO stage, treatment of a sharded target."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from checkpoints.run_folder import score_policy
from sage.trees import AUTOREGRESSIVE
from train.config.schema import Config, ConfigError, PolicyName, Precision, ShardOver

NODE_SHARE = 0.25  # of a GPU's memory that the layers may take; the rest is for the draft, activations and the objective
NUM_PROMPTS, MAX_NEW_TOKENS = 4, 64  # of a short validation
MIN_STEPS = 50  # of a run without a given length; an epoch of a few hundred rows would end before the draft learns anything


@dataclass(frozen=True)
class RunLength:
    """The limits of a run, which ends at the first one it reaches; None: no limit."""

    steps: int | None
    time_s: float | None = None  # of training, without validation and saving, over all starts of the run

    def __str__(self) -> str:
        steps = [] if self.steps is None else [f"{self.steps} steps"]
        minutes = [] if self.time_s is None else [f"{self.time_s / 60:g} minutes"]
        return " or ".join((*steps, *minutes))

    def expected_steps(self, step: int, time_s: float) -> float:
        """Returns the steps that the run will have at its end, if further steps take as long as those so far."""
        limit = math.inf if self.steps is None else self.steps
        if self.time_s is None or time_s <= 0:
            return limit
        return min(limit, max(step, 1) * self.time_s / time_s)


def run_length(config: Config, steps_per_epoch: float | None) -> RunLength:
    """Returns the limits of a run: `train.epochs`, `train.max_steps` and `train.max_minutes`, whichever is reached first.

    Without any, one epoch, repeated for small data until it has `MIN_STEPS` steps. Streams have no `steps_per_epoch` and
    need one of the last two: ConfigError without them.
    """
    train = config.train
    time_s = None if train.max_minutes is None else 60 * train.max_minutes
    has_limit = train.max_steps is not None or time_s is not None
    if _is_repeated(config, steps_per_epoch):
        return RunLength(MIN_STEPS)
    if steps_per_epoch is None and not has_limit:
        raise ConfigError(
            "train.max_steps: missing; streamed data has no known length, so the run needs max_steps or max_minutes"
        )
    limits = [] if train.max_steps is None else [train.max_steps]
    if steps_per_epoch is not None and (train.epochs is not None or not has_limit):
        limits.append(max(1, math.ceil((train.epochs or 1) * steps_per_epoch)))
    return RunLength(min(limits) if limits else None, time_s)


def repetition_line(config: Config, steps_per_epoch: float | None) -> str:
    """Returns the line about small data that are repeated without a given length; empty if they are not."""
    train = config.train
    if steps_per_epoch is None or not _is_repeated(config, steps_per_epoch):
        return ""
    examples = round(steps_per_epoch * train.global_batch_size)
    excess = f"; a train.global_batch_size below {train.global_batch_size} costs less" if steps_per_epoch < 1 else ""
    return (
        f"{examples} example(s) are repeated to {MIN_STEPS} steps ({MIN_STEPS / steps_per_epoch:.1f} epochs); "
        f"train.epochs=N or train.max_steps=N sets the length{excess}"
    )


def _is_repeated(config: Config, steps_per_epoch: float | None) -> bool:
    """Whether an epoch is repeated until the run has `MIN_STEPS` steps."""
    train = config.train
    is_open = train.epochs is None and train.max_steps is None and train.max_minutes is None
    return is_open and steps_per_epoch is not None and steps_per_epoch < MIN_STEPS


def sharding_ranks(config: Config, layer_bytes: float, ranks: int, ranks_per_node: int) -> int:
    """Returns the number of ranks that hold the layers of the target, `layer_bytes`, once: those of a node if they fit.

    A node has `ranks_per_node` consecutive ranks, linked by NVLink; 1 or `ranks` if there is no such division.
    """
    is_divided = 1 < ranks_per_node < ranks and ranks % ranks_per_node == 0
    if not is_divided or config.deepspeed.shard_over is ShardOver.world:
        return ranks
    fits = layer_bytes / ranks_per_node <= NODE_SHARE * config.launch.gpu_memory_gb * 1e9
    return ranks_per_node if fits or config.deepspeed.shard_over is ShardOver.node else ranks


def shorten_validation(config: Config, given: Collection[str]) -> None:
    """Makes validations of a sharded target short where no key of theirs was `given`: every pass gathers all layers.

    One policy, the one that is scored, is measured beside autoregressive decoding, on few prompts and without baselines.
    """
    decode = config.decode
    if not config.deepspeed.shard_target:
        return
    if not {"decode.policies", "decode/policy"} & set(given):
        decode.policies = [scored_policy(config)]
    if "decode.baselines" not in given:
        decode.baselines = []
    if "decode.num_prompts" not in given:
        decode.num_prompts = min(decode.num_prompts, NUM_PROMPTS)
    if "decode.max_new_tokens" not in given:
        decode.max_new_tokens = min(decode.max_new_tokens, MAX_NEW_TOKENS)


def scored_policy(config: Config) -> PolicyName:
    """Returns `score.policy`, else `sage` if it is measured, else the first policy that drafts."""
    return PolicyName(score_policy(config.decode.policies, config.score.policy) or AUTOREGRESSIVE)


def validation_line(config: Config) -> str:
    """Returns the line about the validations of a sharded target; empty for another one."""
    decode = config.decode
    if not config.deepspeed.shard_target:
        return ""
    names = " and ".join([*map(str, decode.policies), *map(str, decode.baselines)])
    return (
        f"validations of the sharded target: {names} on {decode.num_prompts} prompt(s) of at most {decode.max_new_tokens} "
        f"tokens, since every pass gathers it; decode.policies, .baselines, .num_prompts and .max_new_tokens ask for more"
    )


def check_batch(config: Config, world_size: int) -> int:
    """Returns the number of micro-batches per rank and optimizer step, which the global batch has to be divisible by.

    With a budget of tokens it is the most that a step can have: one for each of the rank's sequences.
    """
    if config.train.micro_batch_tokens is not None:
        if config.train.global_batch_size % world_size:
            raise ConfigError(
                f"train.global_batch_size={config.train.global_batch_size}: allowed: a multiple of {world_size} rank(s) with "
                "train.micro_batch_tokens; change one of the two"
            )
        return config.train.global_batch_size // world_size
    per_pass = config.train.micro_batch_size * world_size
    if config.train.global_batch_size % per_pass:
        raise ConfigError(
            f"train.global_batch_size={config.train.global_batch_size}: not a multiple of train.micro_batch_size="
            f"{config.train.micro_batch_size} x {world_size} rank(s) = {per_pass}; change one of the three"
        )
    return config.train.global_batch_size // per_pass


def split_of_length(config: Config, world_size: int, length: int) -> tuple[int, int]:
    """Returns the sequences of a micro-batch and the micro-batches per rank and step, if all sequences have `length` tokens."""
    passes = check_batch(config, world_size)
    if config.train.micro_batch_tokens is None:
        return config.train.micro_batch_size, passes
    size = min(passes, max(1, config.train.micro_batch_tokens // length))
    return size, -(-passes // size)


def split_text(config: Config, world_size: int) -> str:
    """Returns how a step is divided: `2 rank(s) x 4 x 8`, sequences per micro-batch and micro-batches per rank."""
    if config.train.micro_batch_tokens is not None:
        return f"micro-batches of at most {config.train.micro_batch_tokens} tokens on {world_size} rank(s)"
    return f"{world_size} rank(s) x {config.train.micro_batch_size} x {check_batch(config, world_size)}"


def zero_stage(config: Config) -> int:
    """Returns the ZeRO stage of the draft: bf16 needs stage 1, since DeepSpeed sums gradients in float32 only under ZeRO."""
    stage = config.deepspeed.stage
    return max(1, stage) if config.train.precision is Precision.bf16 else stage

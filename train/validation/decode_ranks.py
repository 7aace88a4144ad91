"""Which ranks decode which prompts of a validation, and the merge of their measurements into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from sage.bench.measurement import Measurement
from train.config.schema import Config, ValidateOn
from train.launch.ranks import Ranks
from train.launch.signals import StopFlag
from train.validation.prompts import PromptSet


class Interrupted(Exception):
    """A signal was received while prompts were decoded."""


@dataclass(frozen=True, kw_only=True)
class DecodeShard:
    """The prompts that this rank decodes, and the merge of all ranks' measurements.

    Attributes:
        prompts: empty on a rank that does not decode.
        num_turns: over all ranks, on rank 0.
        merge: returns the measurement of all ranks on rank 0, None elsewhere.
        abort: called instead of `merge` on a rank that stops early; every rank that merges then raises `Interrupted`.
    """

    prompts: PromptSet
    num_turns: int
    merge: Callable[[Measurement | None], Measurement | None]
    abort: Callable[[], object]

    def check_stop(self, stop: StopFlag, done: int, total: int) -> None:
        """Aborts if `stop` is set and prompts are left; called after each of `total` prompts."""
        if stop.is_set and done < total:
            self.abort()


def all_ranks_decode(config: Config, ranks: Ranks) -> bool:
    """Whether prompts are divided among the ranks: on request, or if each rank has a GPU of its own."""
    if config.deepspeed.shard_target:
        return False
    if config.train.validate_on is ValidateOn.auto:
        return ranks.world_size > 1 and ranks.device.type == "cuda"
    return config.train.validate_on is ValidateOn.all


def shard_prompts(config: Config, ranks: Ranks, prompts: PromptSet) -> DecodeShard:
    """Assigns every `world_size`-th prompt to each rank, or all prompts to rank 0.

    A pass of a sharded target takes all ranks: rank 0 decodes and the others follow (see train.engine.sharded_teacher).

    Args:
        prompts: all of them on every rank that decodes, none on the others.
    """
    if all_ranks_decode(config, ranks):
        own = prompts.shard(ranks.rank, ranks.world_size)
        merge = partial(_merge, ranks, prompts, own)
        abort = partial(merge, None, is_interrupted=True)
        return DecodeShard(prompts=own, num_turns=prompts.num_turns, merge=merge, abort=abort)
    return DecodeShard(prompts=prompts, num_turns=prompts.num_turns, merge=partial(_keep_main, ranks), abort=_interrupt)


def _keep_main(ranks: Ranks, own: Measurement | None) -> Measurement | None:
    return own if ranks.is_main else None


def _merge(
    ranks: Ranks, prompts: PromptSet, shard: PromptSet, own: Measurement | None, is_interrupted: bool = False
) -> Measurement | None:
    """Merges on rank 0, which prepares the inputs of the others' prompts itself: pixel values are not sent."""
    if any(ranks.gather(is_interrupted)):
        _interrupt()
    sent = None if own is None else (_without_inputs(own), shard.later_turns)
    found = ranks.gather_on_main(None if ranks.is_main else sent)
    parts = [own] if own is not None else []
    for rank, part in enumerate(found):
        if part is not None:
            measurement, later_turns = part
            parts.append(replace(measurement, prompts=prompts.turns_of(rank, ranks.world_size, later_turns)))
    return interleave(parts) if ranks.is_main else None


def _without_inputs(measurement: Measurement) -> Measurement:
    return replace(measurement, prompts=[replace(prompt, inputs={}) for prompt in measurement.prompts])


def _interrupt() -> NoReturn:
    raise Interrupted


def interleave(parts: Sequence[Measurement]) -> Measurement:
    """Merges the measurements of ranks that decoded every n-th prompt each; prompts keep their order.

    A baseline that failed on one rank is dropped from all.
    """
    first, count = parts[0], sum(len(part.prompts) for part in parts)
    failed = {name: reason for part in parts for name, reason in part.failed.items()}
    order = [(part, place) for place in range(len(first.prompts)) for part in parts if place < len(part.prompts)]
    assert len(order) == count
    return replace(
        first,
        prompts=[part.prompts[place] for part, place in order],
        runs={name: [part.runs[name][place] for part, place in order] for name in first.runs if name not in failed},
        autoregressive=[name for name in first.autoregressive if name not in failed],
        failed=failed,
    )

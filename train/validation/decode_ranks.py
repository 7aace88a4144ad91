"""Which ranks decode which prompts of a validation, and the merge of their measurements into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sage.bench.measurement import Interrupted, Measurement, Planned
from train.config.schema import Config, ValidateOn
from train.launch.ranks import Ranks
from train.launch.signals import StopFlag
from train.validation.prompts import PromptSet


@dataclass(frozen=True)
class DecodeShard:
    """The prompts that this rank decodes, and the merge of all ranks' measurements.

    Attributes:
        prompts: empty on a rank that does not decode.
        divided: the prompts of all ranks, if they are divided among them; None: rank 0 decodes its prompts alone.
    """

    ranks: Ranks
    prompts: PromptSet
    divided: PromptSet | None = None

    @property
    def num_turns(self) -> int:
        """Turns over all ranks, on rank 0."""
        return (self.divided or self.prompts).num_turns

    def check_stop(self, stop: StopFlag, done: int, total: int) -> None:
        """Raises `Interrupted` if `stop` is set and prompts are left; called after each of `total` prompts."""
        if stop.is_set and done < total:
            raise Interrupted

    def merge(self, own: Measurement | None, is_interrupted: bool = False) -> Measurement | None:
        """Returns the measurement of all ranks on rank 0, None elsewhere; an interrupted one is marked as such.

        Rank 0 prepares the inputs of the others' prompts itself: pixel values are not sent.

        Args:
            is_interrupted: whether this rank was interrupted before it completed a prompt.

        Raises:
            Interrupted: if a rank was interrupted, on every rank that merges and returns no measurement.
        """
        ranks = self.ranks
        if self.divided is None:
            if is_interrupted:
                raise Interrupted
            return own if ranks.is_main else None
        is_partial = any(ranks.gather(is_interrupted or (own is not None and own.planned is not None)))
        sent = None if own is None else (_without_inputs(own), self.prompts.later_turns)
        parts = [own] if own is not None else []
        for rank, part in enumerate(ranks.gather_on_main(None if ranks.is_main else sent)):
            if part is not None:
                measurement, later_turns = part
                turns = self.divided.turns_of(rank, ranks.world_size, later_turns)
                parts.append(replace(measurement, prompts=turns[: len(measurement.prompts)]))
        if is_partial and not (ranks.is_main and parts):
            raise Interrupted
        if not ranks.is_main:
            return None
        merged = interleave(parts)
        planned = Planned(prompts=self.divided.num_turns, repeats=max((part.planned or part).repeats for part in parts))
        return replace(merged, planned=planned) if is_partial else merged


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
        return DecodeShard(ranks, prompts.shard(ranks.rank, ranks.world_size), divided=prompts)
    return DecodeShard(ranks, prompts)


def _without_inputs(measurement: Measurement) -> Measurement:
    return replace(measurement, prompts=[replace(prompt, inputs={}, messages=()) for prompt in measurement.prompts])


def interleave(parts: Sequence[Measurement]) -> Measurement:
    """Merges the measurements of ranks that decoded every n-th prompt each; prompts keep their order.

    A baseline that failed on one rank is dropped from all.
    """
    first, count = parts[0], sum(len(part.prompts) for part in parts)
    failed = {name: reason for part in parts for name, reason in part.failed.items()}
    longest = max(len(part.prompts) for part in parts)  # the first one has the most unless it was interrupted
    order = [(part, place) for place in range(longest) for part in parts if place < len(part.prompts)]
    assert len(order) == count
    return replace(
        first,
        repeats=max(part.repeats for part in parts),
        prompts=[part.prompts[place] for part, place in order],
        runs={name: [part.runs[name][place] for part, place in order] for name in first.runs if name not in failed},
        autoregressive=[name for name in first.autoregressive if name not in failed],
        failed=failed,
    )

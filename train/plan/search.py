"""The plan of a run, with the smallest change of its configuration that makes it fit into memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from train.config.checks import MAX_STAGE, check_deepspeed
from train.config.schema import Config, ConfigError, Offload, ShardOver
from train.plan.estimate import LaunchPlan, estimate
from train.plan.memory import Extent
from train.plan.meta import build_on_meta

MAX_GPUS = 64
LEAST_TOKENS = 512  # of a budget for micro-batches


class Change(NamedTuple):
    """A setting with another value, and the override that sets it."""

    group: str
    name: str
    value: Any
    override: str


def plan(config: Config, extent: Extent | None = None) -> LaunchPlan:
    """Returns the plan of a run, with a change that makes it fit if it does not.

    Args:
        extent: of the data; None if they are not known.
    """
    ranks = config.launch.gpus or config.launch.ranks or 1
    found = estimate(config, build_on_meta(config), ranks, extent)
    return found if found.fits else replace(found, change=find_change(found))


def find_change(current: LaunchPlan) -> list[str] | None:
    """Returns the fewest overrides that make the run fit, the mildest first; None if no combination does."""
    kinds = _changes(current.config, current.ranks)
    *own, gpus = kinds
    strongest = [kind[-1] for kind in own]
    if not any(_fits(current, [*strongest, *more]) for more in [[], *([number] for number in gpus)]):
        return None  # not even with all changes together
    for number in range(1, len(kinds) + 1):
        for chosen in itertools.combinations(kinds, number):
            for changes in itertools.product(*chosen):
                if _is_allowed(current, changes) and _fits(current, changes):
                    return [change.override for change in changes]
    return None


def _changes(config: Config, ranks: int) -> list[list[Change]]:
    """Changes that do not alter the result of the training, each kind from mild to strong; the number of GPUs last."""
    train, deepspeed = config.train, config.deepspeed
    batch = "micro_batch_size" if train.micro_batch_tokens is None else "micro_batch_tokens"
    sizes = _halves(getattr(train, batch), 1 if train.micro_batch_tokens is None else LEAST_TOKENS)
    is_over_nodes = deepspeed.shard_over is not ShardOver.world and ranks > config.launch.gpus_per_node
    is_offloaded = not deepspeed.stage or deepspeed.offload_optimizer is not Offload.none
    kinds = [
        [_change("objective", "chunk_tokens", size) for size in _halves(config.objective.chunk_tokens, 128)],
        [_change("train", batch, size) for size in sizes],
        [Change("deepspeed", "stage", stage, f"deepspeed=zero{stage}") for stage in range(deepspeed.stage + 1, MAX_STAGE + 1)],
        [] if deepspeed.shard_target else [Change("deepspeed", "shard_target", True, "deepspeed.shard_target=true")],
        [_change("deepspeed", "shard_over", ShardOver.world)] if is_over_nodes else [],
        [] if is_offloaded else [_change("deepspeed", "offload_optimizer", Offload.cpu)],
    ]
    doubles = itertools.takewhile(lambda more: more <= MAX_GPUS, (ranks << power for power in itertools.count(1)))
    return [*(kind for kind in kinds if kind), [_change("launch", "gpus", more) for more in doubles]]


def _change(group: str, name: str, value: Any) -> Change:
    return Change(group, name, value, f"{group}.{name}={value}")


def _halves(value: int, lowest: int) -> Iterator[int]:
    """Yields value / 2, value / 4, ... down to `lowest`."""
    while value // 2 >= lowest:
        value //= 2
        yield value


def _changed(current: LaunchPlan, changes: Sequence[Change]) -> tuple[Config, int]:
    """Returns the configuration with these changes, and its number of ranks."""
    config, ranks = current.config, current.ranks
    for group, name, value, _ in changes:
        if group == "launch":
            ranks = value
        else:
            config = replace(config, **{group: replace(getattr(config, group), **{name: value})})
    return config, ranks


def _is_allowed(current: LaunchPlan, changes: Sequence[Change]) -> bool:
    try:
        check_deepspeed(*_changed(current, changes))
    except ConfigError:
        return False
    return True


def _fits(current: LaunchPlan, changes: Sequence[Change]) -> bool:
    """Whether the run would fit, allowed or not."""
    config, ranks = _changed(current, changes)
    try:
        return estimate(config, current.models, ranks, current.extent).fits
    except ConfigError:  # the batch cannot be split over so many ranks
        return False

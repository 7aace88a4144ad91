"""The plan of a run, with the smallest change of its configuration that makes it fit into memory."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from train.config.checks import MAX_STAGE, check_deepspeed
from train.config.schema import Config, ConfigError, Offload, ShardOver
from train.plan.estimate import LaunchPlan, estimate
from train.plan.meta import build_on_meta

MAX_GPUS = 64
LEAST_TOKENS = 512  # of a budget for micro-batches


def plan(config: Config) -> LaunchPlan:
    """Returns the plan of a run, with a change that makes it fit if it does not."""
    ranks = config.launch.gpus or config.launch.ranks or 1
    found = estimate(config, build_on_meta(config), ranks)
    return found if found.fits else replace(found, change=find_change(found))


def find_change(current: LaunchPlan) -> list[str] | None:
    """Returns the fewest overrides that make the run fit, the mildest first; None if no combination does."""
    kinds = _changes(current.config, current.ranks)
    *own, gpus = kinds
    strongest = [kind[-1] for kind in own]
    if not any(_is_enough(current, [*strongest, *more]) for more in [[], *([number] for number in gpus)]):
        return None  # not even with all changes together
    for number in range(1, len(kinds) + 1):
        for chosen in itertools.combinations(kinds, number):
            for change in itertools.product(*chosen):
                if fits_with(current, list(change)):
                    return list(change)
    return None


def _changes(config: Config, ranks: int) -> list[list[str]]:
    """Overrides that do not change the result of the training, each kind from mild to strong; the number of GPUs last."""
    micro, chunk, stage = config.train.micro_batch_size, config.objective.chunk_tokens, config.deepspeed.stage
    has_nodes = ranks > config.launch.gpus_per_node
    kinds = [
        [f"objective.chunk_tokens={size}" for size in _halves(chunk, 128)],
        [f"train.micro_batch_size={size}" for size in _halves(micro, 1)]
        if config.train.micro_batch_tokens is None
        else [f"train.micro_batch_tokens={tokens}" for tokens in _halves(config.train.micro_batch_tokens, LEAST_TOKENS)],
        [f"deepspeed=zero{higher}" for higher in range(stage + 1, MAX_STAGE + 1)],
        [] if config.deepspeed.shard_target else ["deepspeed.shard_target=true"],
        ["deepspeed.shard_over=world"] if config.deepspeed.shard_over is not ShardOver.world and has_nodes else [],
        ["deepspeed.offload_optimizer=cpu"] if stage and config.deepspeed.offload_optimizer is Offload.none else [],
    ]
    doubles = itertools.takewhile(lambda more: more <= MAX_GPUS, (ranks << power for power in itertools.count(1)))
    return [*(kind for kind in kinds if kind), [f"launch.gpus={more}" for more in doubles]]


def _halves(value: int, lowest: int) -> Iterator[int]:
    """Yields value / 2, value / 4, ... down to `lowest`."""
    while value // 2 >= lowest:
        value //= 2
        yield value


def fits_with(current: LaunchPlan, change: list[str]) -> bool:
    """Whether a change is allowed and makes the run fit."""
    try:
        check_deepspeed(*_changed(current, change))
    except ConfigError:
        return False
    return _is_enough(current, change)


def _is_enough(current: LaunchPlan, change: list[str]) -> bool:
    """Whether the run would fit, allowed or not."""
    config, ranks = _changed(current, change)
    try:
        return estimate(config, current.models, ranks).fits
    except ConfigError:  # the batch cannot be split over so many ranks
        return False


def _changed(current: LaunchPlan, change: list[str]) -> tuple[Config, int]:
    """Returns the configuration with these overrides, and its number of ranks."""
    changed: dict[str, dict[str, str]] = defaultdict(dict)
    ranks = current.ranks
    for override in change:
        key, _, value = override.partition("=")
        if key == "launch.gpus":
            ranks = int(value)
        elif key == "deepspeed":
            changed["deepspeed"]["stage"] = value.removeprefix("zero")
        else:
            group, _, name = key.rpartition(".")
            changed[group][name] = value
    parts = {group: getattr(current.config, group) for group in changed}
    typed = {
        group: replace(part, **{name: _typed(part.__class__, name, text) for name, text in changed[group].items()})
        for group, part in parts.items()
    }
    return replace(current.config, **typed), ranks


@cache
def _typed(schema: type, name: str, text: str) -> Any:
    """Returns the value of a setting from the text of an override."""
    part = OmegaConf.structured(schema)
    part[name] = text
    return part[name]

"""The number of steps of a run and the learning rate at each step; pure functions, so that resuming needs no state."""

from __future__ import annotations

import math

from train.config.schema import Config, ConfigError, OptimConfig, Schedule


def total_steps(config: Config, steps_per_epoch: float | None) -> int:
    """Returns the optimizer steps of the run: `train.epochs`, at most `train.max_steps`; streams have no `steps_per_epoch`.

    Raises:
        ConfigError: a stream without `train.max_steps`.
    """
    train = config.train
    if steps_per_epoch is None:
        if train.max_steps is None:
            raise ConfigError("train.max_steps: missing; streamed data has no known length, so the run needs max_steps")
        return train.max_steps
    by_epochs = None if train.epochs is None else max(1, math.ceil(train.epochs * steps_per_epoch))
    return min(steps for steps in (by_epochs, train.max_steps) if steps is not None)


def learning_rate(optim: OptimConfig, step: int, total: int) -> float:
    """Returns the learning rate after `step` steps: linear warm-up, then constant or a half cosine to `min_lr_ratio`."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule is Schedule.constant:
        return optim.lr
    done = (step - optim.warmup_steps) / max(1, total - optim.warmup_steps)
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2)

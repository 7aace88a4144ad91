"""The learning rate at each step: a pure function, so that resuming needs no state."""

from __future__ import annotations

import math

from train.config.schema import OptimConfig, Schedule


def learning_rate(optim: OptimConfig, step: int, total: int) -> float:
    """Returns the learning rate after `step` steps: linear warm-up, then constant or a half cosine to `min_lr_ratio`."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule is Schedule.constant:
        return optim.lr
    done = (step - optim.warmup_steps) / max(1, total - optim.warmup_steps)
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2)

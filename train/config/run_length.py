"""The length of a run in optimizer steps."""

from __future__ import annotations

import math

from train.config.schema import Config, ConfigError

MIN_STEPS = 50  # of a run without a given length; an epoch of a few hundred rows would end before the draft learns anything


def total_steps(config: Config, steps_per_epoch: float | None) -> int:
    """Returns the optimizer steps of a run: `train.epochs` or `train.max_steps`, whichever is reached first.

    Without either, one epoch, repeated for small data until it has `MIN_STEPS` steps. Streams have no `steps_per_epoch` and
    need `train.max_steps`: ConfigError without it.
    """
    train = config.train
    if _is_repeated(config, steps_per_epoch):
        return MIN_STEPS
    if steps_per_epoch is None:
        if train.max_steps is None:
            raise ConfigError("train.max_steps: missing; streamed data has no known length, so the run needs max_steps")
        return train.max_steps
    if train.epochs is None and train.max_steps is not None:
        return train.max_steps
    by_epochs = max(1, math.ceil((train.epochs or 1) * steps_per_epoch))
    return by_epochs if train.max_steps is None else min(by_epochs, train.max_steps)


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
    is_open = config.train.epochs is None and config.train.max_steps is None
    return is_open and steps_per_epoch is not None and steps_per_epoch < MIN_STEPS

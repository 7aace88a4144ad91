"""The length of a run in optimizer steps."""

from __future__ import annotations

import math

from train.config.schema import Config, ConfigError

MIN_STEPS = 50  # of a run without a given length; an epoch of a few hundred rows would end before the draft learns anything


def total_steps(config: Config, steps_per_epoch: float | None) -> int:
    """Returns the optimizer steps of a run: `train.epochs` or `train.max_steps`, whichever is reached first.

    Without either, one epoch, repeated for small data until it has `MIN_STEPS` steps. Streams have no `steps_per_epoch`.

    Raises:
        ConfigError: a stream without `train.max_steps`.
    """
    train = config.train
    if steps_per_epoch is None:
        if train.max_steps is None:
            raise ConfigError("train.max_steps: missing; streamed data has no known length, so the run needs max_steps")
        return train.max_steps
    if train.epochs is None and train.max_steps is not None:
        return train.max_steps
    by_epochs = math.ceil((train.epochs or 1) * steps_per_epoch)
    limit = math.inf if train.max_steps is None else train.max_steps
    return int(min(max(by_epochs, 1 if train.epochs else MIN_STEPS), limit))


def repetition_line(config: Config, steps_per_epoch: float | None) -> str:
    """Returns the line about small data that are repeated without a given length; empty if they are not."""
    train = config.train
    if steps_per_epoch is None or train.epochs is not None or train.max_steps is not None or steps_per_epoch >= MIN_STEPS:
        return ""
    examples = round(steps_per_epoch * train.global_batch_size)
    excess = f"; a train.global_batch_size below {train.global_batch_size} costs less" if steps_per_epoch < 1 else ""
    return (
        f"{examples} example(s) are repeated to {MIN_STEPS} steps ({MIN_STEPS / steps_per_epoch:.1f} epochs); "
        f"train.epochs=N or train.max_steps=N sets the length{excess}"
    )

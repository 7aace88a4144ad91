"""The length of a run: optimizer steps, minutes of training, or both."""

from __future__ import annotations

import math
from dataclasses import dataclass

from train.config.schema import Config, ConfigError

MIN_STEPS = 50  # of a run without a given length; an epoch of a few hundred rows would end before the draft learns anything


@dataclass(frozen=True)
class RunLength:
    """The limits of a run, which ends at the first one it reaches.

    Attributes:
        steps: optimizer steps; None: any number.
        time_s: seconds of training without validation and saving, over all starts of the run; None: any number.
    """

    steps: int | None
    time_s: float | None = None

    def __str__(self) -> str:
        steps = [] if self.steps is None else [f"{self.steps} steps"]
        minutes = [] if self.time_s is None else [f"{self.time_s / 60:g} minutes"]
        return " or ".join((*steps, *minutes))

    def is_reached(self, step: int, time_s: float) -> bool:
        """Whether a run that has taken `step` steps in `time_s` seconds of training has its length."""
        return self.expected_steps(step, time_s) <= step

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
    minutes = config.train.max_minutes
    return RunLength(_max_steps(config, steps_per_epoch), None if minutes is None else 60 * minutes)


def _max_steps(config: Config, steps_per_epoch: float | None) -> int | None:
    train = config.train
    if _is_repeated(config, steps_per_epoch):
        return MIN_STEPS
    if train.epochs is None and train.max_minutes is not None:
        return train.max_steps
    if steps_per_epoch is None:
        if train.max_steps is None and train.max_minutes is None:
            raise ConfigError(
                "train.max_steps: missing; streamed data has no known length, so the run needs max_steps or max_minutes"
            )
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
    train = config.train
    is_open = train.epochs is None and train.max_steps is None and train.max_minutes is None
    return is_open and steps_per_epoch is not None and steps_per_epoch < MIN_STEPS

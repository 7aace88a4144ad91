"""The schedule of a run: what is due before the first step, after each step, and at the end; the learning rate.

Pure functions of the settings and the state of a run, so that resuming needs no state of the schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from train.config.derived import RunLength
from train.config.schema import OptimConfig, Schedule, TrainConfig
from train.state.resume import TrainState

# What the training loop does between two steps: a line of metrics.jsonl, the progress display, a validation, a saved state.
Due = StrEnum("Due", ["log", "show", "validate", "save"])


@dataclass(frozen=True)
class RunSchedule:
    """What is due when, in order."""

    train: TrainConfig
    length: RunLength

    def is_over(self, state: TrainState, is_stopping: bool) -> bool:
        """Whether no step is left, or a signal or a lack of progress ends the run."""
        return self.has_length(state) or is_stopping or state.has_stalled(self.train.patience)

    def has_length(self, state: TrainState) -> bool:
        """Whether all steps are taken, or the time is up."""
        return self.length.expected_steps(state.step, state.time_s) <= state.step

    def before_steps(self, state: TrainState) -> list[Due]:
        """Repeats the validation of the step that a run is resumed from, if a signal interrupted or prevented it."""
        is_missing = state.validated_step != state.step and not self.has_length(state)
        return [Due.validate] if is_missing and _is_multiple(state.step, self.train.validate_every) else []

    def after_step(self, state: TrainState, is_stopping: bool) -> list[Due]:
        """The step of a validation that may end the run is logged, for the run's report; a stop postpones the validation."""
        step, train = state.step, self.train
        has_validation = _is_multiple(step, train.validate_every)
        may_end = self.has_length(state) or is_stopping or (has_validation and state.has_stalled(train.patience, more=1))
        due = {
            Due.log: may_end or _is_multiple(step, train.log_every),
            Due.show: True,
            Due.save: _is_multiple(step, train.save_every),  # a validation takes long and may fail
            Due.validate: has_validation and not is_stopping,
        }
        return [action for action, is_due in due.items() if is_due]

    def at_end(self, state: TrainState, is_stopping: bool, validated_at: int | None) -> list[Due]:
        """Saves before the last validation, which takes long and may be interrupted, and again if the best score changes."""
        return [Due.save] if is_stopping or validated_at == state.step else [Due.save, Due.validate, Due.save]


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def learning_rate(optim: OptimConfig, step: int, total: float) -> float:
    """Returns the learning rate after `step` of `total` expected steps: linear warm-up, then constant or half a cosine."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule is Schedule.constant:
        return optim.lr
    done = (step - optim.warmup_steps) / max(1, total - optim.warmup_steps)
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2)

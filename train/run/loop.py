"""The training loop: one step, and the rhythm of logging, saving and validating around it.

Owns: the order of things. Does not own: any of the things.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from checkpoints.store import StateStore
from sage.cli import EXIT_CRASH
from train.config.schema import Config
from train.distill.pairs import count_supervised
from train.distill.teacher import Teacher
from train.engine.engine import Engine
from train.engine.lr_schedule import learning_rate
from train.engine.sharded_teacher import Shards
from train.launch.ranks import Ranks
from train.launch.signals import StopSignal
from train.monitor.metrics import Meter
from train.monitor.profiler import ProfileWindow
from train.monitor.progress import Display
from train.monitor.sinks import Tracker
from train.state.resume import TrainState, save_state

logger = logging.getLogger(__name__)
MicroBatches = list[dict[str, Any]]


class Feed(Protocol):
    """Yields the micro-batches of one optimizer step after the other, without end."""

    def __iter__(self) -> Generator[MicroBatches, None, None]: ...


class TrainingError(RuntimeError):
    """Training cannot go on: the message says where and why; no traceback would add to it."""

    exit_code = EXIT_CRASH


@dataclass(kw_only=True)
class Run:
    """Everything the loop works with, put together in train.run.build. `report` is the last validation's, on rank 0.

    `shards` is there where the teacher's target is spread over the ranks.
    """

    config: Config
    ranks: Ranks
    engine: Engine
    teacher: Teacher
    loader: Feed
    store: StateStore
    tracker: Tracker
    display: Display
    meter: Meter
    state: TrainState
    total_steps: int
    validate: Callable[[Run], None]
    profile: ProfileWindow
    stop: StopSignal = field(default_factory=StopSignal)
    is_stopping: bool = False
    shards: Shards | None = None
    report: dict[str, Any] | None = None

    @property
    def has_stalled(self) -> bool:
        """Whether so many validations in a row brought no better score that the run ends early."""
        return 0 < self.config.train.patience <= self.state.stale


def fit(run: Run) -> bool:
    """Trains to the end, or to the step boundary after a signal.

    Returns:
        whether the end was reached; either way the state is saved and, at the end, the draft validated. A validation that a
        signal has skipped or cut short is made up when the run goes on.
    """
    with closing(run.loader.__iter__()) as steps:
        return _fit(run, steps)


def _fit(run: Run, steps: Iterator[MicroBatches]) -> bool:
    train, state, saved, validated_at = run.config.train, run.state, replace(run.state), None
    if _is_due(state.step, train.validate_every) and state.validated_step != state.step < run.total_steps:
        validated_at = _validate(run)
    while state.step < run.total_steps and not (run.is_stopping or run.has_stalled):
        run.profile.at(state.step)
        lr = learning_rate(run.config.optim, state.step, run.total_steps)
        grad_norm = train_step(run, next(steps), lr)
        state.step += 1
        if _is_due(state.step, train.log_every) or state.step == run.total_steps or run.is_stopping:
            metrics = run.meter.reduce(run.ranks, state, lr=lr, grad_norm=grad_norm)
            run.tracker.log(metrics, state.step)
        run.display.update(state.step, run.meter.latest)
        if _is_due(state.step, train.validate_every) and not run.is_stopping:
            validated_at = _validate(run)
        if _is_due(state.step, train.save_every) or run.is_stopping:
            saved = _save(run)
    if saved.step != state.step:  # ahead of the last validation, which takes long and may be interrupted
        saved = _save(run)
    if validated_at != state.step and not run.is_stopping:
        _validate(run)
    if (state.best_step, state.stale) != (saved.best_step, saved.stale):
        _save(run)
    return not run.is_stopping


def _validate(run: Run) -> int | None:
    """The step validated at; None where a signal has cut it short."""
    with run.meter.paused():
        run.validate(run)
    if run.is_stopping:
        return None
    run.state.validated_step = run.state.step
    return run.state.step


def _save(run: Run) -> TrainState:
    """What was saved of how far the run has come."""
    with run.meter.paused():
        save_state(run.store, run.engine, run.ranks, run.state)
    return replace(run.state)


def train_step(run: Run, micro_batches: MicroBatches, lr: float) -> float:
    """One optimizer step: the gradient of the mean over all supervised tokens of all ranks and micro-batches.

    Returns:
        the norm of that gradient, before clipping.

    Raises:
        TrainingError: nothing is supervised, or loss or gradient is not finite on some rank; no weight was changed.
    """
    count = _agree_on_count(run, micro_batches)
    device = run.ranks.device
    flags: list[Tensor] = []
    for batch in micro_batches:
        pairs = run.teacher(batch)
        loss, sums, agree_KS = run.engine(pairs, run.teacher.lm_head)
        run.engine.backward(loss / count)
        run.meter.add(sums, agree_KS, pairs.mask)
        flags.append(~loss.detach().isfinite() | run.engine.take_bad_gradient())
    is_bad = torch.stack(flags) if flags else torch.zeros(1, dtype=torch.bool, device=device)
    if run.ranks.sum(is_bad.any()) > 0:
        raise TrainingError(_blame(run, micro_batches, is_bad))
    return run.engine.step(lr)


def _agree_on_count(run: Run, micro_batches: MicroBatches) -> float:
    """Supervised tokens of this step over all ranks; on the way every rank learns of tokens seen and of a wish to stop."""
    supervised = sum(int(count_supervised(batch["loss_mask"])) for batch in micro_batches)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in micro_batches)
    totals = run.ranks.sum(torch.tensor([supervised, tokens, run.stop.is_set], dtype=torch.float64))
    run.is_stopping = bool(totals[2])
    run.state.tokens += int(totals[1])
    if not totals[0]:
        names = ", ".join(_ids(micro_batches))
        raise TrainingError(f"step {run.state.step + 1}: no supervised token in the whole batch ({names}); check the data")
    return float(totals[0])


def _blame(run: Run, micro_batches: MicroBatches, is_bad: Tensor) -> str:
    own = [name for batch, bad in zip(micro_batches, is_bad.tolist(), strict=True) if bad for name in _ids([batch])]
    names = [name for part in run.ranks.gather(own) for name in part]
    return (
        f"step {run.state.step + 1}: loss or gradient is not finite for the micro-batch with {', '.join(names)}; "
        f"the weights are those of step {run.state.step}. Look at these examples, or lower optim.lr"
    )


def _ids(micro_batches: MicroBatches) -> list[str]:
    return [str(name) for batch in micro_batches for name in batch.get("ids", ["unnamed"])]


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0

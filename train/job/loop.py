"""The training loop: one optimizer step, and the schedule of logging, validating and saving around it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from checkpoints.run_folder import state_folder, step_name
from checkpoints.store import StateStore
from sage.commands.cli import EXIT_CRASH
from train.config.schema import Config
from train.distill.pairs import count_supervised
from train.distill.teacher import Teacher
from train.engine.engine import Engine
from train.engine.lr_schedule import learning_rate
from train.job.callbacks import Callback
from train.launch.ranks import Ranks
from train.launch.signals import StopFlag
from train.monitor.metrics import TrainingMetrics
from train.monitor.profiler import ProfileWindow
from train.monitor.progress import Display
from train.monitor.sinks import Tracker
from train.state.resume import TrainState, save_state
from train.validation.in_loop import ValidationOutcome

logger = logging.getLogger(__name__)
MicroBatches = list[dict[str, Any]]


class Feed(Protocol):
    """Yields the micro-batches of one optimizer step after another, endlessly."""

    def __iter__(self) -> Generator[MicroBatches, None, None]: ...


class TrainingError(RuntimeError):
    """Training cannot continue. The message names place and reason; no traceback is shown."""

    exit_code = EXIT_CRASH


@dataclass(kw_only=True)
class TrainingRun:
    """The objects of the training loop, built in train.job.build.

    Attributes:
        validate: validates the draft; updates the best score in `state`.
        stop: set by a signal on this rank; `is_stopping` is the same on every rank.
        report: of the last validation, on rank 0.
        callbacks: on rank 0; empty on the others.
    """

    config: Config
    ranks: Ranks
    engine: Engine
    teacher: Teacher
    loader: Feed
    store: StateStore
    tracker: Tracker
    display: Display
    metrics: TrainingMetrics
    state: TrainState
    total_steps: int
    validate: Callable[[], ValidationOutcome]
    profile: ProfileWindow
    stop: StopFlag = field(default_factory=StopFlag)
    is_stopping: bool = False
    report: dict[str, Any] | None = None
    callbacks: Sequence[Callback] = ()

    @property
    def has_stalled(self) -> bool:
        """Whether `train.patience` validations in a row have brought no better score."""
        return self.state.has_stalled(self.config.train.patience)


def fit(run: TrainingRun) -> bool:
    """Trains to the end, or to the step boundary after a signal.

    Returns:
        whether the end was reached. In both cases the state is saved; at the end the draft is validated. A validation that
        was interrupted or skipped because of a signal is repeated when the run is resumed.
    """
    with closing(run.loader.__iter__()) as steps:
        return _fit(run, steps)


def _fit(run: TrainingRun, steps: Iterator[MicroBatches]) -> bool:
    train, state, saved, validated_at = run.config.train, run.state, replace(run.state), None
    if _is_due(state.step, train.validate_every) and state.validated_step != state.step < run.total_steps:
        validated_at = _validate(run)
    while state.step < run.total_steps and not (run.is_stopping or run.has_stalled):
        run.profile.at(state.step)
        lr = learning_rate(run.config.optim, state.step, run.total_steps)
        with deterministic(train.deterministic):
            grad_norm = train_step(run, next(steps), lr)
        state.step += 1
        if _is_due(state.step, train.log_every) or state.step == run.total_steps or run.is_stopping or _may_stall(run):
            line = run.metrics.reduce(run.ranks, state, lr=lr, grad_norm=grad_norm)
            run.tracker.log(line, state.step)
            for callback in run.callbacks:
                callback.on_log(state.step, line)
        run.display.update(state.step, run.metrics.latest)
        if _is_due(state.step, train.validate_every) and not run.is_stopping:
            validated_at = _validate(run)
        if _is_due(state.step, train.save_every) or run.is_stopping:
            saved = _save(run)
    if saved.step != state.step:  # before the last validation, which takes long and may be interrupted
        saved = _save(run)
    if validated_at != state.step and not run.is_stopping:
        _validate(run)
    if (state.best_step, state.stale) != (saved.best_step, saved.stale):
        _save(run)
    return not run.is_stopping


def _may_stall(run: TrainingRun) -> bool:
    """Whether a validation is due that ends the run if it brings no better score; its step is logged for the run's report."""
    train, after = run.config.train, replace(run.state, stale=run.state.stale + 1)
    return _is_due(run.state.step, train.validate_every) and after.has_stalled(train.patience)


def _validate(run: TrainingRun) -> int | None:
    """Validates the draft; returns the step, None if a signal interrupted it."""
    with run.metrics.paused():
        outcome = run.validate()
    run.is_stopping = outcome.is_interrupted
    if outcome.is_interrupted:
        return None
    if outcome.report is not None:
        run.report = outcome.report
        for callback in run.callbacks:
            callback.on_validate(run.state.step, outcome.report)
    run.state.validated_step = run.state.step
    return run.state.step


def _save(run: TrainingRun) -> TrainState:
    """Saves a checkpoint; returns a copy of the saved `TrainState`."""
    with run.metrics.paused():
        save_state(run.store, run.engine, run.ranks, run.state)
    for callback in run.callbacks:
        callback.on_save(run.state.step, state_folder(run.config.run.dir) / step_name(run.state.step))
    return replace(run.state)


def train_step(run: TrainingRun, micro_batches: MicroBatches, lr: float) -> float:
    """Takes one optimizer step on the mean loss over all supervised tokens of all ranks and micro-batches.

    Returns:
        the norm of the gradient before clipping.

    Raises:
        TrainingError: no token is supervised, or loss or gradient is not finite on some rank; no weight is changed.
    """
    count = _reduce_counts(run, micro_batches)
    device = run.ranks.device
    flags: list[Tensor] = []
    for batch in micro_batches:
        pairs = run.teacher(batch)
        loss, sums, agree_KS = run.engine(pairs, run.teacher.lm_head)
        run.engine.backward(loss / count)
        run.metrics.add(sums, agree_KS, pairs.mask)
        flags.append(~loss.detach().isfinite() | run.engine.take_bad_gradient())
    is_bad = torch.stack(flags) if flags else torch.zeros(1, dtype=torch.bool, device=device)
    if run.ranks.sum(is_bad.any()) > 0:
        raise TrainingError(_not_finite_message(run, micro_batches, is_bad))
    return run.engine.step(lr)


@contextmanager
def deterministic(is_on: bool) -> Iterator[None]:
    """Allows PyTorch deterministic algorithms only; an operation that has none raises RuntimeError."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_on or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _reduce_counts(run: TrainingRun, micro_batches: MicroBatches) -> float:
    """Returns the supervised tokens of this step over all ranks; also reduces the token count and the stop flag."""
    supervised = sum(int(count_supervised(batch["loss_mask"])) for batch in micro_batches)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in micro_batches)
    totals = run.ranks.sum(torch.tensor([supervised, tokens, run.stop.is_set], dtype=torch.float64))
    run.is_stopping = bool(totals[2])
    run.state.tokens += int(totals[1])
    if not totals[0]:
        names = ", ".join(_ids(micro_batches))
        raise TrainingError(f"step {run.state.step + 1}: no supervised token in the batch ({names}); check the data")
    return float(totals[0])


def _not_finite_message(run: TrainingRun, micro_batches: MicroBatches, is_bad: Tensor) -> str:
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

"""The training loop: an optimizer step, and what is due after it. When that is, is data (train.job.schedule)."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints.run_folder import read_command, step_name
from checkpoints.store import StateStore
from data_prep.config import Answers
from data_prep.loader import StepLoader
from sage.commands.cli import EXIT_CRASH
from sage.io.model_files import in_one_line
from train.config.command_line import changed_command
from train.config.derived import RunLength
from train.config.schema import Config
from train.distill.own_answers import OwnAnswers
from train.distill.teacher import Teacher, count_supervised
from train.engine.engine import Engine
from train.job.callbacks import Callback
from train.job.schedule import Due, RunSchedule, learning_rate
from train.launch.ranks import Ranks
from train.launch.supervisor import StopFlag
from train.monitor.metrics import TrainingMetrics
from train.monitor.profiler import ProfileWindow
from train.monitor.progress import Display
from train.monitor.sinks import Tracker
from train.state.resume import TrainState, rng_state, save_draft, save_state, set_rng_state
from train.validation.in_loop import ValidationOutcome

logger = logging.getLogger(__name__)
MicroBatches = list[dict[str, Any]]


class TrainingError(RuntimeError):
    """Training cannot continue. The message names place and reason; no traceback is shown."""

    exit_code = EXIT_CRASH


@dataclass(kw_only=True)
class TrainingRun:
    """The objects of the training loop, built in train.job.build, and what the loop keeps between two steps."""

    config: Config
    ranks: Ranks
    engine: Engine
    teacher: Teacher
    loader: StepLoader
    store: StateStore
    tracker: Tracker
    display: Display
    metrics: TrainingMetrics
    state: TrainState
    length: RunLength
    validate: Callable[[], ValidationOutcome]  # updates the best score in `state`
    profile: ProfileWindow
    stop: StopFlag = field(default_factory=StopFlag)  # set by a signal on this rank
    own_answers: OwnAnswers | None = None  # measures the answers of the data in the first steps; None: not measured
    is_finished: bool = False  # a resumed run has nothing left to do
    figures: dict[str, float] = field(default_factory=dict)  # of the last step, and what is measured once, until it is logged
    callbacks: Sequence[Callback] = ()  # on rank 0; empty on the others
    is_stopping: bool = field(default=False, init=False)  # whether `stop` is set, on every rank
    saved: TrainState = field(init=False)  # the state when it was last saved, or at the start
    validated_at: int | None = field(default=None, init=False)  # step of the last complete validation by this process
    report: dict[str, Any] | None = field(default=None, init=False)  # of that validation, on rank 0
    failure: str = field(default="", init=False)  # why the last validation failed; empty if it did not

    def __post_init__(self) -> None:
        self.saved = replace(self.state)

    @property
    def expected_steps(self) -> float:
        """Steps of the run, as far as they are known; see `RunLength`."""
        return self.length.expected_steps(self.state.step, self.state.time_s)


def fit(run: TrainingRun) -> bool:
    """Trains to the end, or to the step boundary after a signal: for each batch, a step, then what is due after it.

    Returns whether the end was reached. In both cases the state is saved; at the end the draft is validated. TrainingError if
    the last validation failed; everything is saved.
    """
    schedule = RunSchedule(run.config.train, run.length)
    if run.ranks.device.type == "cuda" and not schedule.is_over(run.state, run.is_stopping):
        with run.metrics.paused():
            try_largest(run)
    with closing(run.loader.__iter__()) as batches:
        perform(run, schedule.before_steps(run.state))
        while not schedule.is_over(run.state, run.is_stopping):
            run.profile.at(run.state.step)
            micro_batches = next(batches)
            with deterministic(run.config.train.deterministic):
                train_step(run, micro_batches)
            perform(run, schedule.after_step(run.state, run.is_stopping))
        perform(run, schedule.at_end(run.state, run.is_stopping, run.validated_at))
    if run.failure and not run.is_stopping:
        folder = run.config.run.dir
        raise TrainingError(
            f"{folder}: step {run.state.step} is saved, but its validation failed ({run.failure}); repeat it with sage-train "
            f"--resume {shlex.quote(folder)}, or with smaller settings: sage-validate "
            f"{shlex.quote(f'checkpoint={folder}/draft')} decode.num_prompts=N"
        )
    return not run.is_stopping


def perform(run: TrainingRun, due: Iterable[Due]) -> None:
    """Performs what is due, in order."""
    for action in due:
        match action:
            case Due.log:
                _log(run)
            case Due.show:
                run.display.update(run.state.step, max(run.state.step, run.expected_steps), run.metrics.latest)
            case Due.validate:
                _validate(run)
            case Due.save:
                _save(run)


def _log(run: TrainingRun) -> None:
    line = run.metrics.reduce(run.ranks, run.state, **run.figures)
    run.figures = {}
    run.tracker.log(line, run.state.step)
    for callback in run.callbacks:
        callback.on_log(run.state.step, line)


def _validate(run: TrainingRun) -> None:
    """Validates the draft; a signal that interrupts it stops the run, a failure does not."""
    with run.metrics.paused():
        outcome = run.validate()
    run.is_stopping, run.failure = outcome.is_interrupted, outcome.failure
    if outcome.is_interrupted or outcome.failure:
        return
    if outcome.report is not None:
        run.report = outcome.report
        for callback in run.callbacks:
            callback.on_validate(run.state.step, outcome.report)
    run.validated_at = run.state.validated_step = run.state.step


def _save(run: TrainingRun) -> None:
    """Saves a state, and the draft, which can be measured meanwhile, unless the last ones hold the same progress."""
    state, saved = run.state, run.saved
    if (state.step, state.best_step, state.stale) == (saved.step, saved.best_step, saved.stale):
        return
    with run.metrics.paused():
        save_state(run.store, run.engine, run.ranks, state)
        save_draft(Path(run.config.run.dir), run.engine, run.ranks, state.step)
    for callback in run.callbacks:
        callback.on_save(state.step, run.store.folder / step_name(state.step))
    run.saved = replace(state)


def train_step(run: TrainingRun, micro_batches: MicroBatches) -> None:
    """Takes one optimizer step on the mean loss over all supervised tokens of all ranks and micro-batches, and counts it.

    TrainingError if no token is supervised, or loss or gradient is not finite on some rank; no weight is changed.
    """
    num_supervised = _reduce_counts(run, micro_batches)
    device = run.ranks.device
    flags: list[Tensor] = []
    for number, batch in enumerate(micro_batches, start=1):
        pairs = run.teacher(batch)
        if run.own_answers is not None:
            run.own_answers.add(batch, pairs)
        loss, sums, agreements = run.engine(pairs, run.teacher.lm_head)
        run.engine.backward(loss / num_supervised, is_last=number == len(micro_batches))
        run.metrics.add(sums, agreements, pairs.mask)
        flags.append(~loss.detach().isfinite() | run.engine.take_bad_gradient())
    is_bad = torch.stack(flags) if flags else torch.zeros(1, dtype=torch.bool, device=device)
    if run.ranks.sum(is_bad.any()) > 0:
        raise TrainingError(_not_finite_message(run, micro_batches, is_bad))
    _report_own_answers(run, num_supervised)
    lr = learning_rate(run.config.optim, run.state.step, run.expected_steps)
    run.figures |= {"lr": lr, "grad_norm": run.engine.step(lr)}
    run.state.step += 1


def try_largest(run: TrainingRun) -> None:
    """Runs the largest micro-batch on every rank, so that a lack of memory shows before the first step, and changes nothing.

    TrainingError if it does not fit, or its loss is not finite.
    """
    if (batch := run.loader.largest()) is None:
        return
    size = "x".join(map(str, batch["loss_mask"].shape))
    generators = rng_state(run.ranks.device)
    try:
        run.engine.optimizer_state.allocate()
        loss, *_ = run.engine(run.teacher(batch), run.teacher.lm_head)
        run.engine.backward(loss * 0, is_last=False)
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"rank {run.ranks.rank}: the largest micro-batch ({size} tokens with padding) does not fit into memory: "
            f"{in_one_line(error)}; launch.plan=true names a configuration that fits"
        ) from error
    is_bad = run.engine.take_bad_gradient() | ~loss.detach().isfinite()
    if run.ranks.sum(is_bad) > 0:
        raise TrainingError(_not_finite_message(run, [batch], is_bad[None]))
    set_rng_state(generators, run.ranks.device)
    logger.info("the largest micro-batch, %s tokens with padding, fits", size)


def _report_own_answers(run: TrainingRun, num_supervised: float) -> None:
    """Logs, in the step that completes the measurement, how many supervised tokens are the target's own choice."""
    measured = None if run.own_answers is None else run.own_answers.end_step(run.ranks, run.state.step + 1, num_supervised)
    if measured is None:
        return
    run.figures |= measured.metrics()
    logger.info("%s", measured.line())
    if measured.is_foreign and run.config.data.answers is Answers.given:
        folder = run.config.run.dir
        logger.warning(
            "%s", measured.warning(changed_command(read_command(Path(folder)), folder, "data.answers=target", "own"))
        )


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
    """Returns the supervised tokens of this step over all ranks; also reduces the token count, the stop flag and the time."""
    supervised = sum(int(count_supervised(batch["loss_mask"])) for batch in micro_batches)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in micro_batches)
    counts = [supervised, tokens, run.stop.is_set, run.metrics.tick()]
    totals = run.ranks.sum(torch.tensor(counts, dtype=torch.float64))
    run.is_stopping = bool(totals[2])
    run.state.tokens += int(totals[1])
    run.state.time_s += float(totals[3]) / run.ranks.world_size
    if not totals[0]:
        names = ", ".join(_ids(micro_batches))
        raise TrainingError(f"step {run.state.step + 1}: no supervised token in the batch ({names}); check the data")
    return float(totals[0])


def _not_finite_message(run: TrainingRun, micro_batches: MicroBatches, is_bad: Tensor) -> str:
    bad = [batch for batch, is_wrong in zip(micro_batches, is_bad.tolist(), strict=True) if is_wrong]
    names = [name for names in run.ranks.gather(_ids(bad)) for name in names]
    return (
        f"step {run.state.step + 1}: loss or gradient is not finite for the micro-batch with {', '.join(names)}; "
        f"the weights are those of step {run.state.step}. Look at these examples, or lower optim.lr"
    )


def _ids(micro_batches: MicroBatches) -> list[str]:
    return [str(name) for batch in micro_batches for name in batch.get("ids", ["unnamed"])]

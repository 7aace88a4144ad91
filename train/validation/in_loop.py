"""Validation during training: saves the draft, decodes on one rank or all of them, merges, keeps the best draft."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import sage
from checkpoints.run_folder import BEST_DRAFT, METRICS, read_metrics
from checkpoints.run_folder import score as score_of
from checkpoints.store import SaveFailed, saving
from sage.bench.measurement import Interrupted, Measurement, Planned
from sage.bench.report_table import interruption
from sage.io.folders import new_folder
from sage.io.model_files import in_one_line
from sage.planning.base import Policy
from train.config.schema import Config, ValidateOn
from train.engine.engine import Engine
from train.engine.sharded_teacher import ShardedTarget
from train.launch.ranks import Ranks, RunDisk
from train.launch.supervisor import StopFlag
from train.monitor.progress import Display
from train.monitor.sinks import Tracker
from train.report.run_page import write_run_report
from train.report.verdict import verdict_lines
from train.state.resume import TrainState, rng_state, save_draft, set_rng_state
from train.validation.prompts import PromptSet
from train.validation.validate import ReportInfo, validate


@dataclass(frozen=True)
class DecodeShard:
    """The prompts that this rank decodes, and the merge of all ranks' measurements."""

    ranks: Ranks
    prompts: PromptSet  # empty on a rank that does not decode
    divided: PromptSet | None = None  # the prompts of all ranks if they are divided among them; None: rank 0 decodes alone

    @property
    def num_turns(self) -> int:
        """Turns over all ranks, on rank 0."""
        return (self.divided or self.prompts).num_turns

    def check_stop(self, stop: StopFlag, done: int, total: int) -> None:
        """Called after each of `total` prompts; raises `Interrupted` if `stop` is set and prompts are left."""
        if stop.is_set and done < total:
            raise Interrupted

    def merge(self, own: Measurement | None, is_interrupted: bool = False) -> Measurement | None:
        """Returns the measurement of all ranks on rank 0, None elsewhere; one that lacks prompts is marked as interrupted.

        Rank 0 prepares the inputs of the others' prompts itself: pixel values are not sent. Raises Interrupted on rank 0 if no
        rank completed a prompt.

        Args:
            is_interrupted: whether this rank was interrupted before it completed a prompt.
        """
        parts, received = [] if own is None else [own], list[Any]()
        if self.divided is not None:
            sent = None
            if own is not None:
                prompts = [replace(prompt, inputs={}, messages=()) for prompt in own.prompts]
                sent = replace(own, prompts=prompts), self.prompts.later_turns
            received = self.ranks.gather_on_main(None if self.ranks.is_main else (sent, is_interrupted))
        if not self.ranks.is_main:
            return None
        for rank, (sent, was_interrupted) in enumerate(received[1:], start=1):
            is_interrupted |= was_interrupted
            if sent is not None:
                measurement, later_turns = sent
                turns = (self.divided or self.prompts).turns_of(rank, self.ranks.world_size, later_turns)
                parts.append(replace(measurement, prompts=turns[: len(measurement.prompts)]))
        if not parts:
            raise Interrupted
        if self.divided is None:
            return own
        merged, is_partial = interleave(parts), is_interrupted or any(part.planned is not None for part in parts)
        planned = Planned(prompts=self.divided.num_turns, repeats=max((part.planned or part).repeats for part in parts))
        return replace(merged, planned=planned) if is_partial else merged


def all_ranks_decode(config: Config, ranks: Ranks) -> bool:
    """Whether prompts are divided among the ranks: on request, or if each rank has a GPU of its own."""
    if config.deepspeed.shard_target:
        return False
    if config.train.validate_on is ValidateOn.auto:
        return ranks.world_size > 1 and ranks.device.type == "cuda"
    return config.train.validate_on is ValidateOn.all


def shard_prompts(config: Config, ranks: Ranks, prompts: PromptSet) -> DecodeShard:
    """Assigns every `world_size`-th prompt to each rank, or all prompts to rank 0. A pass of a sharded target takes all ranks:
    rank 0 decodes, and the others, which have no `prompts`, follow (see train.engine.sharded_teacher).
    """
    if all_ranks_decode(config, ranks):
        return DecodeShard(ranks, prompts.shard(ranks.rank, ranks.world_size), divided=prompts)
    return DecodeShard(ranks, prompts)


def interleave(parts: Sequence[Measurement]) -> Measurement:
    """Merges the measurements of ranks that decoded every n-th prompt each; prompts keep their order.

    A baseline that failed on one rank is dropped from all.
    """
    failed = {name: reason for part in parts for name, reason in part.failed.items()}
    longest = max(len(part.prompts) for part in parts)  # the first one has the most unless it was interrupted
    order = [(part, place) for place in range(longest) for part in parts if place < len(part.prompts)]
    return replace(
        parts[0],
        repeats=max(part.repeats for part in parts),
        prompts=[part.prompts[place] for part, place in order],
        runs={name: [part.runs[name][place] for part, place in order] for name in parts[0].runs if name not in failed},
        autoregressive=[name for name in parts[0].autoregressive if name not in failed],
        failed=failed,
    )


logger = logging.getLogger(__name__)
MAX_REASON = 200  # characters


@dataclass(frozen=True, kw_only=True)
class ValidationOutcome:
    report: dict[str, Any] | None = None  # on rank 0, unless interrupted; None elsewhere
    is_interrupted: bool = False  # whether a signal ended it early, the same on every rank
    failure: str = ""  # the first rank that failed, and why, the same on every rank; empty if none did


@dataclass(kw_only=True)
class InLoopValidation:
    """Validates the draft in training. Every rank has to call it.

    The random generators are restored, so that the frequency of validations does not change a run. After a signal the
    validation ends with the current prompt; a report of the prompts until then is kept, and counts for nothing. A validation
    that fails, for instance for lack of memory, counts for nothing either; with a sharded target it raises its error, since
    the other ranks wait within a pass.
    """

    config: Config
    ranks: Ranks
    engine: Engine
    target: sage.Target  # on this rank, or its part of `sharded`
    sharded: ShardedTarget | None
    tracker: Tracker  # receives the figures of the report
    state: TrainState  # `best`, `best_step` and `stale` are updated
    stop: StopFlag
    shard: DecodeShard  # the prompts that this rank decodes
    disk: RunDisk  # the run folder
    policies: dict[str, Policy]  # every validation decodes with copies of them, which have learned nothing
    display: Display = field(default_factory=Display)  # shows the progress of every validation

    def __call__(self) -> ValidationOutcome:
        folder, generators = self._save_draft(), rng_state(self.ranks.device)
        report, is_interrupted, failure = None, False, ""
        try:
            report = self._measure(folder)
        except Interrupted:
            is_interrupted = True
        except Exception as error:
            if self.sharded is not None or isinstance(error, SaveFailed):
                raise
            logger.debug("validation failed", exc_info=True)
            failure = f"rank {self.ranks.rank}: {type(error).__name__}: {in_one_line(error)[:MAX_REASON]}"
        if report is not None and "partial" in report:
            logger.info("%s: %s", report["path"], interruption(report["partial"]))
            report, is_interrupted = None, True
        set_rng_state(generators, self.ranks.device)
        score = None if report is None else score_of(report, self.config.score.metric, self.config.score.policy)
        found = self.ranks.gather((score, is_interrupted, failure))
        score, is_interrupted, _ = found[0]
        if failure := next((reason for *_, reason in found if reason), ""):
            logger.warning("step %d: validation failed (%s); training goes on", self.state.step, failure)
            return ValidationOutcome(failure=failure)
        if is_interrupted:
            logger.info("step %d: validation interrupted; it is repeated when the run is resumed", self.state.step)
            return ValidationOutcome(is_interrupted=True)
        if report is not None:
            self.tracker.log(flatten(report), self.state.step)
            for line in verdict_lines(report)[:-1]:  # without the command, which is for the end of the run
                logger.info("%s", line)
        self._keep_best(folder, score)
        if self.ranks.is_main and read_metrics(self._run_dir / METRICS):  # a step is logged
            with saving(self._run_dir):
                write_run_report(self._run_dir)
        return ValidationOutcome(report=report)

    @property
    def _run_dir(self) -> Path:
        return Path(self.config.run.dir)

    def _save_draft(self) -> Path:
        """Writes `draft/`; returns the folder from which this rank can load it."""
        folder = save_draft(self._run_dir, self.engine, self.ranks, self.state.step)
        if self.shard.divided is None:
            return folder
        self.ranks.wait_for_all()  # other ranks load it next
        return self.disk.fetch(folder)

    @torch.no_grad()
    def _measure(self, folder: Path) -> dict[str, Any] | None:
        """Returns the report on rank 0, None elsewhere. Raises Interrupted on rank 0 after a signal, and any other error on
        this rank alone; its part of the merge is done, so that no rank waits for it.
        """
        shard, has_merged = self.shard, False

        def progress(done: int, total: int, figures: str) -> None:
            self.display.show_validation(done, total, figures)
            shard.check_stop(self.stop, done, total)

        def merge(own: Measurement | None, **options: bool) -> Measurement | None:
            nonlocal has_merged
            has_merged = True
            return shard.merge(own, **options)

        if not shard.prompts.prompts:
            if self.sharded is not None:
                self.sharded.follow()
            shard.merge(None)
            return None
        logger.info("validating at step %d on %d prompts", self.state.step, shard.num_turns)
        try:
            draft = sage.load_draft(folder, self.target)
            with self.sharded.leading() if self.sharded is not None else nullcontext():
                return validate(
                    self.config.decode,
                    self.target,
                    draft,
                    shard.prompts,
                    ReportInfo(run_dir=self._run_dir, step=self.state.step, draft_name=str(folder), run=self._run_dir),
                    policies=copy.deepcopy(self.policies),
                    progress=progress,
                    merge=merge,
                )
        except Exception:
            if not has_merged:
                with suppress(Interrupted):
                    shard.merge(None, is_interrupted=True)
            raise

    def _keep_best(self, folder: Path, score: float | None) -> None:
        """Copies the draft to `draft_best/` if its score is the highest so far, else counts a validation without progress."""
        state = self.state
        if score is None:
            return
        if state.best is not None and score <= state.best:
            state.stale += 1
            if state.has_stalled(self.config.train.patience):
                logger.info("stopping early: no better %s in %d validations", self.config.score.metric, state.stale)
            return
        state.best, state.best_step, state.stale = score, state.step, 0
        if self.ranks.is_main:
            best = folder.with_name(BEST_DRAFT)
            with saving(best), new_folder(best) as part:
                shutil.copytree(folder, part, dirs_exist_ok=True)


def flatten(report: dict[str, Any]) -> dict[str, float]:
    """Returns the figures of a report as `validation/POLICY/NAME`, for sinks that draw curves."""
    return {
        f"validation/{policy}/{name}": float(value)
        for policy, figures in report["policies"].items()
        for name, value in figures.items()
        if isinstance(value, (int, float))
    }

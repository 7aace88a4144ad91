"""The hand-over of a draft in training: saved in Hugging Face format, judged by the decoder, the best one kept.

Owns: `draft/` and `draft_best/` of a run folder, which ranks decode which prompts, when to stop early. Does not own: measuring
(train.validation.validate), which figure is the score (checkpoints.run_folder).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

import sage
from checkpoints.files import part_of as part_folder
from checkpoints.files import replace_folder
from checkpoints.run_folder import BEST_DRAFT, DRAFT
from checkpoints.run_folder import score as score_of
from checkpoints.store import saving
from data_prep.conversation import Conversation
from data_prep.multi_turn import LATER
from sage.bench.measurement import Measurement
from sage.manifest import write_manifest
from train.config.schema import Config, ValidateOn
from train.launch.ranks import Ranks
from train.launch.signals import StopSignal
from train.report.run_page import write_run_report
from train.run.loop import Run
from train.state.resume import rng_state, set_rng_state
from train.validation.validate import validate

logger = logging.getLogger(__name__)


def save_draft(run: Run) -> Path:
    """Writes `draft/`, sealed; it loads on one process without DeepSpeed. Every rank has to call it."""
    folder = Path(run.config.run.dir) / DRAFT
    weights = run.engine.draft_state()
    if run.ranks.is_main:
        part = part_folder(folder)
        with saving(folder):
            shutil.rmtree(part, ignore_errors=True)
            run.engine.student.save(part, weights)
            write_manifest(part, run.state.step)
            replace_folder(part, folder)
    run.ranks.barrier()  # others may be about to load it
    return folder


def validate_draft(run: Run, prompts: list[Any]) -> None:
    """Saves the draft, measures what was saved, keeps it as `draft_best/` if none before was better.

    The random generators are left as they were, so validating more or less often does not change a run. After a signal it ends
    with the prompt at hand, and `run.is_stopping` is set. Every rank has to call it.

    Args:
        prompts: all of them, on the ranks that decode.
    """
    folder, generators = save_draft(run), rng_state(run.ranks.device)
    report, is_stopped = None, False
    try:
        report = _measure(run, folder, prompts)
    except Stopped:
        is_stopped = True
    set_rng_state(generators, run.ranks.device)
    score = None if report is None else score_of(report, run.config.score.metric, run.config.score.policy)
    score, run.is_stopping = run.ranks.share((score, is_stopped))  # the other ranks wait here
    if run.is_stopping:
        logger.info("stopped while validating at step %d; that is made up when the run goes on", run.state.step)
        return
    if report is not None:
        run.tracker.log(flatten(report), run.state.step)
        run.report = report
    keep_best(run, folder, score)
    if run.ranks.is_main and run.meter.latest:  # something is logged
        with saving(Path(run.config.run.dir)):
            write_run_report(Path(run.config.run.dir))


def keep_best(run: Run, folder: Path, score: float | None) -> None:
    """Copies a draft with the best score so far to `draft_best/`, and counts the validations that brought none."""
    if score is None:
        return
    if run.state.best is not None and score <= run.state.best:
        run.state.stale += 1
        if run.has_stalled:
            logger.info("stopping early: no better %s in %d validations", run.config.score.metric, run.state.stale)
        return
    run.state.best, run.state.best_step, run.state.stale = score, run.state.step, 0
    if run.ranks.is_main:
        best = folder.with_name(BEST_DRAFT)
        with saving(best):
            shutil.rmtree(part_folder(best), ignore_errors=True)
            shutil.copytree(folder, part_folder(best))
            replace_folder(part_folder(best), best)


# -- who decodes -----------------------------------------------------------------------------------------------------------


def all_ranks_decode(config: Config, ranks: Ranks) -> bool:
    """Whether prompts are divided among the ranks: on request, or where each has a device of its own."""
    if config.deepspeed.shard_target:
        return False
    if config.train.validate_on is ValidateOn.auto:
        return ranks.world_size > 1 and ranks.device.type == "cuda"
    return config.train.validate_on is ValidateOn.all


class Stopped(Exception):
    """A signal has come while prompts were decoded."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What this rank decodes, and how the ranks' measurements become one; `merge` answers None except on rank 0.

    `give_up` takes the place of `merge` on a rank that does not go on: with it, every rank that merges raises `Stopped`.
    """

    prompts: Sequence[Any]
    merge: Callable[[Measurement | None], Measurement | None]
    give_up: Callable[[], object]

    def look(self, stop: StopSignal, done: int, total: int) -> None:
        """Called after each of `total` prompts: gives up where a signal has come and prompts are left."""
        if stop.is_set and done < total:
            self.give_up()


def part_of(run: Run, prompts: Sequence[Any]) -> Part:
    """Rank 0 decodes everything, or every rank each world_size-th prompt.

    A target whose weights are spread over the ranks needs all of them for every pass: there rank 0 decodes and the others
    follow (see train.engine.sharded_teacher).
    """
    ranks = run.ranks
    if all_ranks_decode(run.config, ranks):
        chosen = first_turns(prompts, run.config.decode.num_prompts)
        own = chosen[ranks.rank :: ranks.world_size]
        return Part(prompts=own, merge=partial(_merged, ranks), give_up=partial(_merged, ranks, None, is_stopped=True))
    return Part(prompts=prompts if ranks.is_main else (), merge=lambda own: own if ranks.is_main else None, give_up=_give_up)


def first_turns(prompts: Sequence[Any], limit: int) -> list[Any]:
    """The conversations that hold the first `limit` turns to be asked, the last of them cut short."""
    chosen: list[Any] = []
    for prompt in prompts:
        if limit < 1:
            break
        later = prompt.meta.get(LATER, []) if isinstance(prompt, Conversation) else []
        chosen.append(replace(prompt, meta=prompt.meta | {LATER: later[: limit - 1]}) if later else prompt)
        limit -= 1 + len(later)
    return chosen


def _merged(ranks: Ranks, own: Measurement | None, is_stopped: bool = False) -> Measurement | None:
    found = ranks.gather((own, is_stopped))
    if any(has_given_up for _, has_given_up in found):
        _give_up()
    return interleave([part for part, _ in found if part is not None]) if ranks.is_main else None


def _give_up() -> NoReturn:
    raise Stopped


def interleave(parts: Sequence[Measurement]) -> Measurement:
    """One measurement from those of ranks that took every n-th prompt each: the runs themselves, prompts in order.

    A baseline that failed on one rank is left out everywhere.
    """
    first, count = parts[0], sum(len(part.prompts) for part in parts)
    failed = {name: reason for part in parts for name, reason in part.failed.items()}
    order = [(part, place) for place in range(len(first.prompts)) for part in parts if place < len(part.prompts)]
    assert len(order) == count
    return replace(
        first,
        prompts=[part.prompts[place] for part, place in order],
        runs={name: [part.runs[name][place] for part, place in order] for name in first.runs if name not in failed},
        autoregressive=[name for name in first.autoregressive if name not in failed],
        failed=failed,
    )


@torch.no_grad()
def _measure(run: Run, folder: Path, prompts: list[Any]) -> dict[str, Any] | None:
    """The report, on rank 0; None elsewhere. Every rank has to call it.

    Raises:
        Stopped: after a signal, on every rank that decodes.
    """
    part = part_of(run, prompts)
    if not part.prompts:
        if run.shards is not None:
            run.shards.follow()
        part.merge(None)
        return None
    logger.info("validating at step %d on %d prompts", run.state.step, min(len(prompts), run.config.decode.num_prompts))
    target = run.teacher.target
    draft = sage.load_draft(folder, target)
    with run.shards.leading() if run.shards is not None else nullcontext():
        return validate(
            run.config,
            target,
            draft,
            run.state.step,
            run.config.run.dir,
            part.prompts,
            draft_name=str(folder),
            progress=partial(part.look, run.stop),
            merge=part.merge,
        )


def flatten(report: dict[str, Any]) -> dict[str, float]:
    """The figures of a report under `validation/POLICY/NAME`, for sinks that draw curves."""
    return {
        f"validation/{policy}/{name}": float(value)
        for policy, figures in report["policies"].items()
        for name, value in figures.items()
        if isinstance(value, (int, float))
    }

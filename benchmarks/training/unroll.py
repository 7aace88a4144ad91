"""Optimizer steps that compute the draft for the roots of supervised positions, against steps for all positions.

Both kinds of step take the same batches in turn, with one engine and one draft, so that other load affects both alike. The
weights change from step to step, which does not change what is computed.
"""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from statistics import median

from benchmarks.training.measuring import Samples, describe_machine, ratio_spread
from sage.io.tables import text_table
from sage.runtime.timing import now_s
from train.config.checks import split_text
from train.distill.student import MAX_ROOTS, HeadStudent, roots_of
from train.job.loop import MicroBatches, TrainingRun, train_step

ROOTS, ALL = "rows of supervised positions", "all rows"
HEAD = ("draft computes", "median time of a step (range)")
MAX_SHARE = {ROOTS: MAX_ROOTS, ALL: 0.0}  # `HeadStudent.max_roots` of each kind of step


def measure(run: TrainingRun, num_steps: int, warmup: int) -> str:
    """Takes steps of both kinds in turn, every other pair in the opposite order; returns the text to print.

    Args:
        run: trains a draft head.
    """
    student = run.engine.student
    assert isinstance(student, HeadStudent)
    samples, shares = {name: Samples() for name in MAX_SHARE}, list[float]()
    with closing(run.loader.__iter__()) as steps:
        for number, batches in enumerate(islice(steps, warmup + num_steps)):
            for name in MAX_SHARE if number % 2 else reversed(MAX_SHARE):
                seconds = _step(run, student, batches, MAX_SHARE[name])
                samples[name].seconds += [seconds] if number >= warmup else []
            shares.append(_share_of_rows(batches, run.config.objective.steps))
    return _text(run, samples, median(shares[warmup:]))


def _step(run: TrainingRun, student: HeadStudent, batches: MicroBatches, max_share: float) -> float:
    """Takes an optimizer step; returns its seconds."""
    student.max_roots = max_share
    start = now_s(run.ranks.device)
    train_step(run, batches, run.config.optim.lr)
    return now_s(run.ranks.device) - start


def _share_of_rows(batches: MicroBatches, steps: int) -> float:
    """Returns the share of rows that are computed for supervised positions, without a compressor."""
    computed = total = 0
    for batch in batches:
        mask = batch["loss_mask"][:, 2:].bool()
        roots = roots_of(mask, steps)
        total += mask.numel()
        computed += mask.numel() if roots is None else roots.numel()
    return computed / total


def _text(run: TrainingRun, samples: dict[str, Samples], share: float) -> str:
    config, ours, twin = run.config, samples[ROOTS], samples[ALL]
    ratio, low, high = ratio_spread(ours.seconds, twin.seconds)
    return "\n".join(
        (
            f"{run.teacher.target.name}, draft={config.draft.kind}, {config.objective.steps} unrolled step(s), "
            f"{len(ours.seconds)} optimizer steps of {config.train.global_batch_size} = "
            f"{split_text(config, run.ranks.world_size)} of each kind",
            "",
            text_table(HEAD, [(name, one.text()) for name, one in samples.items()], "<>"),
            f"{ROOTS} / {ALL}: time {ratio:.3f} ({low:.3f}-{high:.3f}); rows {share:.2f}",
            describe_machine(run.ranks.device),
        )
    )

"""An optimizer step against its parts: forward pass of the teacher, forward and backward pass of the draft, each alone.

The remainder is overhead: the engine, the optimizer, the checks of every step, metrics and waiting for data.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.training.measuring import GIB, describe_machine, peak, reset_peak
from sage.io.tables import text_table
from sage.runtime.timing import now_s
from train.config.checks import split_text
from train.config.schema import Config
from train.distill.pairs import count_supervised
from train.distill.student import Student
from train.job.build import building
from train.job.loop import MicroBatches, TrainingRun, train_step
from train.launch.ranks import Ranks


class StepTimes(NamedTuple):
    """Seconds of a step with its data, of waiting for them, and of its parts alone; tokens of the step."""

    total: float
    wait: float
    teacher: float
    forward: float
    backward: float
    tokens: int


def measure(config: Config, ranks: Ranks, num_steps: int, warmup: int) -> str:
    """Times the steps of a run in a temporary folder, interleaved with their parts alone on the same batches.

    Returns:
        the text to print.
    """
    with tempfile.TemporaryDirectory(prefix="train-bench-") as folder:
        config.run.dir = str(Path(folder) / "run")
        with building(config, ranks) as run:
            alone = copy.deepcopy(run.engine.student)
            before = reset_peak(ranks.device)
            with closing(run.loader.__iter__()) as steps:
                times = [_measure_step(run, alone, steps) for _ in range(warmup + num_steps)][warmup:]
            return _text(run, times, peak(ranks.device) - before)


def _measure_step(run: TrainingRun, alone: Student, steps: Iterator[MicroBatches]) -> StepTimes:
    device = run.ranks.device
    start = now_s(device)
    batches = next(steps)
    ready = now_s(device)
    train_step(run, batches)
    total = now_s(device) - start
    trained = [p for p in alone.parameters() if p.requires_grad]
    durations = []
    for batch in batches:
        begin = now_s(device)
        pairs = run.teacher(batch)
        teacher_end = now_s(device)
        loss = alone(pairs, run.teacher.lm_head)[0] / count_supervised(batch["loss_mask"])
        forward_end = now_s(device)
        torch.autograd.grad(loss, trained)
        durations.append((teacher_end - begin, forward_end - teacher_end, now_s(device) - forward_end))
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    teacher, forward, backward = map(sum, zip(*durations, strict=True))
    return StepTimes(total, ready - start, teacher, forward, backward, tokens)


def _text(run: TrainingRun, times: Sequence[StepTimes], peak_bytes: int) -> str:
    # one ratio per step, so that other load affects both sides
    ratios, config = sorted(one.total / (one.teacher + one.forward + one.backward) for one in times), run.config
    total, wait, *parts, tokens = zip(*times, strict=True)
    rows = [("optimizer step", f"{1e3 * median(total):.1f} ms", f"{median(tokens) / median(total):,.0f} tokens/s")]
    for name, seconds in zip(("teacher forward", "draft forward, loss", "draft backward"), parts, strict=True):
        rows.append((name, f"{1e3 * median(seconds):.1f} ms", "alone"))
    waited = sum(wait) / sum(total)
    return "\n".join(
        (
            f"{run.teacher.target.name}, draft={config.draft.kind}, {len(ratios)} steps of {config.train.global_batch_size} = "
            f"{split_text(config, run.ranks.world_size)}, {median(tokens):.0f} tokens, "
            f"ZeRO {config.deepspeed.stage}, {config.train.precision}",
            "",
            text_table(None, rows, "<><"),
            f"step / parts: {median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f}); data wait {100 * waited:.2f}% of the time",
            f"peak {peak_bytes / GIB:.2f} GiB beyond weights and optimizer state",
            describe_machine(run.ranks.device),
        )
    )

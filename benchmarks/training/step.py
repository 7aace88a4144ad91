"""An optimizer step against its parts: forward pass of the teacher, forward and backward pass of the draft, each alone.

The remainder is overhead: the engine, the optimizer, the checks of every step, metrics and waiting for data.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

import sage
from benchmarks.random_targets import random_target
from benchmarks.training.measuring import GIB, describe_machine, peak, reset_peak
from checkpoints.store import StateStore
from sage.bench.shapes import Shape
from sage.io.dtypes import torch_dtype
from sage.io.tables import text_table
from sage.runtime.timing import now_s
from train.config.checks import check_batch, split_of_length, split_text
from train.config.schema import Config
from train.distill.build import build_student
from train.distill.pairs import count_supervised
from train.distill.student import Student
from train.engine.engine import Engine
from train.job.build import build_teacher, building
from train.job.loop import MicroBatches, TrainingRun, train_step
from train.launch.ranks import Ranks
from train.monitor.metrics import TrainingMetrics
from train.monitor.profiler import ProfileWindow
from train.monitor.progress import Display
from train.monitor.sinks import Tracker
from train.state.resume import TrainState
from train.validation.in_loop import ValidationOutcome


class StepTimes(NamedTuple):
    """Seconds of a step with its data, of waiting for them, and of its parts alone; tokens of the step."""

    total: float
    wait: float
    teacher: float
    forward: float
    backward: float
    tokens: int


class RandomFeed:
    """Optimizer steps of random tokens, the second half of each sequence supervised; without data wait."""

    def __init__(self, target: sage.Target, length: int, size: int, accumulation: int) -> None:
        shape = (size, length)
        ids = torch.randint(target.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        mask = torch.arange(length).expand(shape) >= length // 2
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": mask, **target.family.token_inputs(ids)}
        self.step = [batch] * accumulation

    def __iter__(self) -> Generator[MicroBatches, None, None]:
        while True:
            yield self.step


@contextmanager
def run_of_shape(config: Config, ranks: Ranks, shape: Shape, num_layers: int, length: int) -> Iterator[TrainingRun]:
    """Yields a run on a random target of a shape, without files; raises ValueError for more layers than it has, or none."""
    if not 1 <= num_layers <= shape.num_layers:
        raise ValueError(f"--layers {num_layers}: {shape.name} takes 1 to {shape.num_layers}")
    size, accumulation = split_of_length(config, ranks.world_size, length)
    target = random_target(shape, num_layers, torch_dtype(config.target.dtype), ranks.device, length + 1)
    feed = RandomFeed(target, length, size, accumulation)
    student = build_student(config, target, None, ranks)
    engine = Engine(student, config, ranks, check_batch(config, ranks.world_size))
    try:
        yield TrainingRun(
            config=config,
            ranks=ranks,
            engine=engine,
            teacher=build_teacher(config, target, student),
            loader=feed,
            store=StateStore(Path("unused"), 1),
            tracker=Tracker(),
            display=Display(),
            metrics=TrainingMetrics(feed),
            state=TrainState(),
            total_steps=1,
            validate=lambda: ValidationOutcome(report=None, is_interrupted=False),
            profile=ProfileWindow("unused", None, ranks.rank),
        )
    finally:
        engine.close()


@contextmanager
def run_of_target(config: Config, ranks: Ranks) -> Iterator[TrainingRun]:
    """Yields the run of a configuration, with its data, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="train-bench-") as folder:
        config.run.dir = str(Path(folder) / "run")
        with building(config, ranks) as run:
            yield run


def measure(run: TrainingRun, num_steps: int, warmup: int) -> str:
    """Times steps interleaved with their parts alone on the same batches; returns the text to print."""
    alone = copy.deepcopy(run.engine.student)
    before = reset_peak(run.ranks.device)
    with closing(run.loader.__iter__()) as steps:
        times = [_measure_step(run, alone, steps) for _ in range(warmup + num_steps)][warmup:]
    return _text(run, times, peak(run.ranks.device) - before)


def _measure_step(run: TrainingRun, alone: Student, steps: Iterator[MicroBatches]) -> StepTimes:
    device = run.ranks.device
    start = now_s(device)
    batches = next(steps)
    ready = now_s(device)
    train_step(run, batches, run.config.optim.lr)
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

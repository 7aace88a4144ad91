"""An optimizer step against its parts: forward pass of the teacher, forward and backward pass of the draft, each alone.

The remainder is overhead: the engine, the optimizer, the checks of every step, metrics and waiting for data.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

import sage
from benchmarks.training.measuring import GIB, describe_machine, peak, reset_peak
from checkpoints.store import StateStore
from sage.bench.shapes import Shape, random_target
from sage.io.dtypes import torch_dtype
from sage.io.tables import text_table
from sage.runtime.timing import now_s
from train.config.checks import check_batch
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


@dataclass
class Parts:
    """Seconds of each measured step and of its parts alone, and tokens per step."""

    step: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    teacher: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def ratios(self) -> list[float]:
        """Step with data wait over the sum of its parts; one per step, so that other load affects both sides."""
        columns = zip(self.step, self.wait, self.teacher, self.forward, self.backward, strict=True)
        return [(step + wait) / sum(parts) for step, wait, *parts in columns]


class RandomFeed:
    """Optimizer steps of random tokens, the second half of each sequence supervised; without data wait."""

    def __init__(self, config: Config, target: sage.Target, length: int, accumulation: int) -> None:
        shape = (config.train.micro_batch_size, length)
        ids = torch.randint(target.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        mask = torch.arange(length).expand(shape) >= length // 2
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": mask, **target.family.token_inputs(ids)}
        self.step = [batch] * accumulation

    def __iter__(self) -> Generator[MicroBatches, None, None]:
        while True:
            yield self.step


@contextmanager
def run_of_shape(config: Config, ranks: Ranks, shape: Shape, num_layers: int, length: int) -> Iterator[TrainingRun]:
    """Yields a run on a random target of a shape; no file is read or written."""
    if not 1 <= num_layers <= shape.num_layers:
        raise ValueError(f"--layers {num_layers}: {shape.name} takes 1 to {shape.num_layers}")
    accumulation = check_batch(config, ranks.world_size)
    target = random_target(shape, num_layers, torch_dtype(config.target.dtype), ranks.device, length + 1)
    feed = RandomFeed(config, target, length, accumulation)
    student = build_student(config, target, None, ranks)
    engine = Engine(student, config, ranks, accumulation)
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
    device, parts = run.ranks.device, Parts()
    alone = copy.deepcopy(run.engine.student)
    before = reset_peak(device)
    steps = run.loader.__iter__()
    try:
        for number in range(warmup + num_steps):
            _measure_step(run, alone, steps, parts if number >= warmup else Parts())
    finally:
        steps.close()
    return _text(run, parts, peak(device) - before)


def _measure_step(run: TrainingRun, alone: Student, steps: Iterator[MicroBatches], parts: Parts) -> None:
    device = run.ranks.device
    start = now_s(device)
    batches = next(steps)
    ready = now_s(device)
    train_step(run, batches, run.config.optim.lr)
    parts.wait.append(ready - start)
    parts.step.append(now_s(device) - ready)
    parts.tokens.append(sum(int(batch["attention_mask"].sum()) for batch in batches))
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
    for column, seconds in zip((parts.teacher, parts.forward, parts.backward), zip(*durations, strict=True), strict=True):
        column.append(sum(seconds))


def _text(run: TrainingRun, parts: Parts, peak_bytes: int) -> str:
    ratios, config = sorted(parts.ratios()), run.config
    step_s = median(s + w for s, w in zip(parts.step, parts.wait, strict=True))
    parts_s = {"teacher forward": parts.teacher, "draft forward, loss": parts.forward, "draft backward": parts.backward}
    rows = [("optimizer step", f"{1e3 * step_s:.1f} ms", f"{median(parts.tokens) / step_s:,.0f} tokens/s")]
    rows += [(name, f"{1e3 * median(seconds):.1f} ms", "alone") for name, seconds in parts_s.items()]
    waited = sum(parts.wait) / (sum(parts.step) + sum(parts.wait))
    return "\n".join(
        (
            f"{run.teacher.target.name}, draft={config.draft.kind}, {len(ratios)} steps of {config.train.global_batch_size} = "
            f"{config.train.micro_batch_size} x {run.engine.accumulation}, {median(parts.tokens):.0f} tokens, "
            f"ZeRO {config.deepspeed.stage}, {config.train.precision}",
            "",
            text_table(None, rows, "<><"),
            f"step / parts: {median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f}); data wait {100 * waited:.2f}% of the time",
            f"peak {peak_bytes / GIB:.2f} GiB beyond weights and optimizer state",
            describe_machine(run.ranks.device),
        )
    )

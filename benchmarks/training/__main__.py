"""`python -m benchmarks.training`: an optimizer step against its parts, each alone: the teacher's forward pass, forward and
backward pass of the draft; with --images, the parts at published sizes. Also takes overrides of sage-train.

The remainder of a step is overhead: the engine, the optimizer, the checks of every step, metrics and waiting for data.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.figures import GIB, describe_machine, peak, reset_peak
from benchmarks.training import parts
from sage.commands.cli import new_parser, run
from sage.io.tables import text_table
from sage.runtime.timing import now_s
from train.config.checks import MAX_STAGE, check
from train.config.derived import split_text
from train.config.hydra_app import compose
from train.config.schema import Config
from train.distill.student import Student
from train.distill.teacher import count_supervised
from train.job.build import building
from train.job.loop import MicroBatches, TrainingRun, train_step
from train.launch.ranks import Ranks, pick_device, process_group


def main() -> int:
    arguments, overrides = _parser().parse_known_args()
    if unknown := [word for word in overrides if word.startswith("-")]:
        raise ValueError(f"{unknown[0]}: unknown to benchmarks.training; see --help")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.images is not None:
        print(_parts(arguments, overrides))
        return 0
    config = compose("config", [*overrides, f"launch.device={arguments.device}"], Config)
    check(config)
    if config.deepspeed.stage == MAX_STAGE:
        raise ValueError("deepspeed.stage=3: allowed: 0, 1 or 2 here; under ZeRO-3 the draft cannot run outside the engine")
    with process_group(arguments.device, config.launch.timeout_s) as ranks:
        print(measure_steps(config, ranks, arguments.measured, arguments.warmup))
    return 0


def _parts(arguments: argparse.Namespace, overrides: list[str]) -> str:
    config = compose("config", [*overrides, "launch.plan=true"], Config)  # opens no data
    check(config)
    sizes = parts.Sizes(
        sequences=config.train.micro_batch_size,
        length=arguments.length,
        image=arguments.images,
        supervised=arguments.supervised,
    )
    device = pick_device(arguments.device, 0)
    found = parts.measure(config, sizes, arguments.layers, device, arguments.measured, arguments.warmup, arguments.out)
    return found.text()


def _size(text: str) -> tuple[int, int]:
    """Parses `640x480`."""
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"{text!r}: give width and height in pixels, such as 640x480")
    return int(width), int(height)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: allowed: above 0, at most 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("python -m benchmarks.training", description=__doc__)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--threads", type=int, help="CPU threads; default: as torch chooses")
    parser.add_argument("--measured", type=int, default=20, help="steps to time")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--layers", type=int, help="text layers of --images; default: all")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each sequence of --images (default: %(default)s)")
    text = "time the parts of a step on sequences with one image each, with random weights; default %(const)s"
    parser.add_argument("--images", metavar="WxH", type=_size, nargs="?", const="640x480", help=text)
    parser.add_argument("--supervised", type=_share, default=0.25, help="share of the text of --images (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="write the table of --images as JSON")
    return parser


# -- an optimizer step against its parts --------------------------------------------------------------------------------


class StepTimes(NamedTuple):
    """Seconds of a step with its data, of waiting for them, and of its parts alone; tokens of the step."""

    total: float
    wait: float
    teacher: float
    forward: float
    backward: float
    tokens: int


def measure_steps(config: Config, ranks: Ranks, num_steps: int, warmup: int) -> str:
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


if __name__ == "__main__":
    sys.exit(run(main))

"""`python -m benchmarks.training`: an optimizer step against its parts, each alone; with --images, the parts at published
sizes with random weights, beside the operations of the plan (docs/plan.md). Also takes overrides of sage-train.

The remainder of a step is overhead: the engine, the optimizer, the checks of every step, metrics and waiting for data.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES, get_image_processor_class_from_name

from benchmarks.figures import GIB, Figures, describe_machine, peak, reset_peak
from benchmarks.shapes import limit_layers, random_target
from sage.commands.cli import new_parser, run
from sage.io.dtypes import torch_dtype
from sage.io.tables import text_table
from sage.runtime.modes import VisionAttention, resolve_attention
from sage.runtime.prefix_attention import HALF
from sage.runtime.timing import now_s
from sage.targets.families import family_of
from sage.targets.loading import load_processor, set_attention
from train.config.checks import MAX_STAGE, check
from train.config.derived import split_text
from train.config.hydra_app import compose
from train.config.schema import Config
from train.distill.build import fresh_draft, new_student, vocabulary_size
from train.distill.compiled_layers import draft_layers
from train.distill.student import Student, supervised_features
from train.distill.teacher import Staging, Teacher, count_supervised
from train.job.build import build_teacher, building
from train.job.loop import MicroBatches, TrainingRun, train_step
from train.launch.ranks import Ranks, pick_device, process_group
from train.plan.estimate import flops_of_step
from train.plan.memory import MetaModels, Workload, target_architecture

PARTS = {
    "vision": "vision tower, embedding",
    "text": "teacher's text layers",
    "draft": "draft, forward and backward",
    "objective": "objective",
}
IMAGE, SUPERVISED = (640, 480), 0.25  # pixels, and the supervised share of the text
HEAD = ("part", "TFLOP of the plan", "ms", "share of peak", "peak, GiB")
Part = Callable[[str], AbstractContextManager[None]]


def main() -> int:
    arguments, overrides = _parser().parse_known_args()
    if unknown := [word for word in overrides if word.startswith("-")]:
        raise ValueError(f"{unknown[0]}: unknown to benchmarks.training; see --help")
    if arguments.images is not None:
        print(measure(arguments, overrides).text())
        return 0
    config = compose("config", [*overrides, f"launch.device={arguments.device}"], Config)
    check(config)
    if config.deepspeed.stage == MAX_STAGE:
        raise ValueError("deepspeed.stage=3: allowed: 0, 1 or 2 here; under ZeRO-3 the draft cannot run outside the engine")
    with process_group(arguments.device, config.launch.timeout_s) as ranks:
        print(measure_steps(config, ranks, arguments.measured, arguments.warmup))
    return 0


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
    parser.add_argument("--measured", type=int, default=20, help="steps to time")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--layers", type=int, help="text layers of --images; default: all")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each sequence of --images (default: %(default)s)")
    text = "time the parts of a step on sequences with one image each, with random weights; default 640x480"
    parser.add_argument("--images", metavar="WxH", type=_size, nargs="?", const=IMAGE, help=text)
    parser.add_argument(
        "--supervised", type=_share, default=SUPERVISED, help="share of the text of --images (default: %(default)s)"
    )
    parser.add_argument("--out", metavar="FILE", help="write the table of --images as JSON")
    return parser


# -- an optimizer step against its parts --------------------------------------------------------------------------------


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


def _measure_step(run: TrainingRun, alone: Student, steps: Iterator[MicroBatches]) -> dict[str, float]:
    """Returns the seconds of a step with its data, of waiting for them, and of its parts alone; and its tokens."""
    device, start = run.ranks.device, now_s(run.ranks.device)
    batches = next(steps)
    wait_s = now_s(device) - start
    train_step(run, batches)
    total_s = now_s(device) - start
    seconds = dict.fromkeys(PARTS, 0.0)
    for batch in batches:
        run_parts(run.teacher, alone, batch, partial(_timed, device=device, seconds=seconds))
    return {"total": total_s, "wait": wait_s, "tokens": sum(int(b["attention_mask"].sum()) for b in batches), **seconds}


def _text(run: TrainingRun, steps: Sequence[dict[str, float]], peak_bytes: int) -> str:
    # one ratio per step, so that other load affects both sides
    ratios, config = sorted(step["total"] / sum(step[name] for name in PARTS) for step in steps), run.config
    middle = {name: median(step[name] for step in steps) for name in steps[0]}
    rows = [("optimizer step", f"{1e3 * middle['total']:.1f} ms", f"{middle['tokens'] / middle['total']:,.0f} tokens/s")]
    rows += [(text, f"{1e3 * middle[name]:.1f} ms", "alone") for name, text in PARTS.items()]
    waited = sum(step["wait"] for step in steps) / sum(step["total"] for step in steps)
    return "\n".join(
        (
            f"{run.teacher.target.name}, draft={config.draft.kind}, {len(ratios)} steps of {config.train.global_batch_size} = "
            f"{split_text(config, run.ranks.world_size)}, {middle['tokens']:.0f} tokens, "
            f"ZeRO {config.deepspeed.stage}, {config.train.precision}",
            "",
            text_table(None, rows, "<><"),
            f"step / parts: {median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f}); data wait {100 * waited:.2f}% of the time",
            f"peak {peak_bytes / GIB:.2f} GiB beyond weights and optimizer state",
            describe_machine(run.ranks.device),
        )
    )


# -- parts at published sizes ---------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, overrides: list[str]) -> Figures:
    """Times a micro-batch; the weights of target and draft are random. `--out` receives the table after every repeat.

    Raises ValueError for a target without images, or for an image that is longer than a sequence.
    """
    config = compose("config", [*overrides, "launch.plan=true"], Config)  # opens no data
    check(config)
    device, architecture = pick_device(arguments.device, 0), target_architecture(config.target)
    complete = limit_layers(architecture, arguments.layers, config.target.name)
    processor, sequences = image_processor(config.target.path, architecture), config.train.micro_batch_size
    family = family_of(architecture)
    batch = make_batch(family, processor, sequences, arguments.length, arguments.images, arguments.supervised)
    config.data.max_length, config.train.global_batch_size = arguments.length, sequences
    gc.collect()
    teacher, student = build(config, architecture, device)
    work = workload(config, teacher, student, batch)
    staged = Staging(teacher.target, device, teacher.target.dtype)(batch)
    repeats, peaks = list[dict[str, float]](), dict.fromkeys(PARTS, 0)
    width, height = arguments.images
    title = (
        f"{config.target.name}, {teacher.target.num_layers} of {complete} text layers, draft={config.draft.kind}, "
        f"{config.objective.steps} step(s), {config.train.precision}: {sequences} sequences with an image of {width} x {height}"
    )
    for number in range(arguments.warmup + arguments.measured):
        seconds = dict.fromkeys(PARTS, 0.0)
        run_parts(teacher, student, staged, partial(_timed, device=device, seconds=seconds, peaks=peaks))
        if number >= arguments.warmup:
            repeats.append(seconds)
            figures = _figures(title, batch, repeats, peaks, work, device)
            figures.write(arguments.out)
    return figures


def workload(config: Config, teacher: Teacher, student: Student, batch: dict[str, Any]) -> Workload:
    """Returns what the plan knows of a micro-batch."""
    share = float(teacher.target.family.visual_mask(batch["input_ids"]).float().mean())
    models = MetaModels(target=teacher.target, draft=student.decoding_draft)
    return Workload(config=config, models=models, ranks=1, visual_share=share)


def build(config: Config, architecture: Any, device: torch.device) -> tuple[Teacher, Student]:
    """Returns a teacher and a student with random weights, with the attention that the device would have in a run."""
    dtype = torch_dtype(config.target.dtype)
    target = random_target(architecture, dtype, device)
    choice = VisionAttention(config.target.attention)
    set_attention(target.model, resolve_attention(choice, device.type, dtype in HALF, target.family.is_packed, True))
    size = vocabulary_size(config.draft, target)
    vocabulary = None if size >= target.vocab_size else torch.arange(size)
    student = new_student(fresh_draft(config, target, vocabulary), config).to(torch_dtype(config.train.precision))
    student.layers = draft_layers(config, student.compilable(), device)
    return build_teacher(config, target, student), student


def image_processor(path: str, architecture: Any) -> Any:
    """Returns the image processor of a folder, or else one of the architecture with the defaults of its class."""
    if Path(path).expanduser().is_dir():
        processor = load_processor(path).image_processor
    else:
        classes = IMAGE_PROCESSOR_MAPPING_NAMES.get(architecture.model_type)
        processor = None if classes is None else get_image_processor_class_from_name(classes["pil"])()
    if processor is None:
        raise ValueError(f"--images: {architecture.model_type} takes no images; choose a vision-language target")
    return processor


def make_batch(
    family: Any, processor: Any, sequences: int, length: int, size: tuple[int, int] = IMAGE, supervised: float = SUPERVISED
) -> dict[str, Any]:
    """Returns a micro-batch of random tokens; each sequence begins with the same image and ends with its supervised tokens.

    Args:
        size: width and height of the image, in pixels.
        supervised: share of the text.
    """
    image = Image.effect_noise(size, 64).convert("RGB")
    pixels, (text,) = family.encode_images(processor, [image]), family.image_texts(processor, [size])
    count = text.count(family.placeholders["image"])
    if count + 2 >= length:
        raise ValueError(f"--images: an image takes {count} tokens; --length {length} is too short")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(1000, min(family.slots.values())), (sequences, length), generator=generator)
    ids[:, 1 : 1 + count] = family.slots["image"]
    first = length - int((length - count - 1) * supervised)
    mask = (torch.arange(length) >= first).expand_as(ids)
    tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": mask}
    stacked = {key: family.stack(key, [value] * len(ids)) for key, value in pixels.items()}
    return {**tokens, **stacked, **family.token_inputs(ids)}


def run_parts(teacher: Teacher, student: Student, batch: dict[str, Any], part: Part) -> None:
    """Runs the forward and backward pass of a micro-batch; `part(name)` surrounds each of PARTS."""
    with part("vision"):
        prompt = teacher.embed(batch)
    with part("text"):
        pairs = teacher.pairs(prompt)
    with part("draft"), student.layers.installed():
        output = student.predict(pairs, teacher.lm_head)
    with part("objective"):
        sums = student.objective(output, supervised_features(pairs, output), teacher.lm_head)
    trained = [p for p in student.parameters() if p.requires_grad]
    with part("draft"):
        torch.autograd.grad(sums.loss / count_supervised(batch["loss_mask"]), trained, allow_unused=True)


@contextmanager
def _timed(name: str, device: torch.device, seconds: dict[str, float], peaks: dict[str, int] | None = None) -> Iterator[None]:
    """Adds the seconds of the block; `peaks` keeps the most bytes allocated. The clock waits for the device at both ends."""
    if peaks is not None:
        reset_peak(device)
    start = now_s(device)
    yield
    seconds[name] += now_s(device) - start
    if peaks is not None:
        peaks[name] = max(peaks[name], peak(device))


def _figures(
    title: str,
    batch: dict[str, Any],
    repeats: Sequence[dict[str, float]],
    peaks: dict[str, int],
    work: Workload,
    device: torch.device,
) -> Figures:
    """Returns a row per part, and their sum, from the seconds of each part in each repeat."""
    plan, launch, rows = flops_of_step(work), work.config.launch, []
    total_s = [sum(seconds.values()) for seconds in repeats]
    columns = {text: (plan[name], [seconds[name] for seconds in repeats], peaks[name]) for name, text in PARTS.items()}
    columns["sum"] = (sum(plan.values()), total_s, max(peaks.values()))
    for text, (flops, each_s, peak_bytes) in columns.items():
        share = f"{flops / median(each_s) / launch.gpu_peak_tflops / 1e12:.0%}"
        rows.append([text, f"{flops / 1e12:.4g}", f"{1e3 * median(each_s):.1f}", share, f"{peak_bytes / GIB:.1f}"])
    tokens, supervised = batch["input_ids"].numel(), int(count_supervised(batch["loss_mask"]))
    notes = [
        f"{tokens} tokens, {work.visual_share:.2f} visual, {supervised} supervised",
        f"the plan takes the {round((1 - work.visual_share) * tokens)} tokens of text to be supervised; "
        f"share of {launch.gpu_peak_tflops:g} TFLOP/s (launch.gpu_peak_tflops)",
        f"{tokens / median(total_s):,.0f} tokens/s without the optimizer",
    ]
    return Figures(title, HEAD, rows, notes, describe_machine(device))


if __name__ == "__main__":
    sys.exit(run(main))

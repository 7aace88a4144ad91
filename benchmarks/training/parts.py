"""Time and memory of the parts of a training step on sequences with one image each, beside the operations of the plan.

The target has published sizes and random weights; the plan's operations (docs/plan.md) are the floor of each part.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES, get_image_processor_class_from_name

import sage
from benchmarks.figures import GIB, Figures, describe_machine, peak, reset_peak
from sage.io.dtypes import torch_dtype
from sage.runtime.modes import VisionAttention, resolve_attention
from sage.runtime.prefix_attention import HALF
from sage.runtime.timing import now_s
from sage.targets.families import family_of
from sage.targets.loading import load_processor, set_attention
from train.config.schema import Config
from train.distill.build import fresh_draft, new_student, vocabulary_size
from train.distill.compiled_layers import draft_layers
from train.distill.student import Student, supervised_features
from train.distill.teacher import Staging, Teacher, count_supervised
from train.job.build import build_teacher
from train.plan.estimate import flops_of_step
from train.plan.memory import MetaModels, Workload, target_architecture

PARTS = {
    "vision": "vision tower, embedding",
    "text": "teacher's text layers",
    "draft": "draft, forward and backward",
    "objective": "objective",
}
HEAD = ("part", "TFLOP of the plan", "ms", "share of peak", "peak, GiB")
Part = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A micro-batch: its sequences, their tokens, the pixels of their images, and the supervised share of their text."""

    sequences: int
    length: int
    image: tuple[int, int] = (640, 480)
    supervised: float = 0.25


@dataclass
class Measured:
    """Seconds of a part in each repeat, and the most bytes allocated during it."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def measure(
    config: Config,
    sizes: Sizes,
    num_layers: int | None,
    device: torch.device,
    repeats: int,
    warmup: int,
    out: str | None = None,
) -> Figures:
    """Times a micro-batch; the weights of target and draft are random. Raises ValueError for a target without images, or for
    an image that is longer than a sequence.

    Args:
        num_layers: text layers of the target; None for all.
        out: file that receives the table after every repeat.
    """
    architecture = target_architecture(config.target)
    depth = limit_layers(config, architecture, num_layers)
    batch = make_batch(family_of(architecture), image_processor(config.target.path, architecture), sizes)
    config.data.max_length = sizes.length
    config.train.global_batch_size = config.train.micro_batch_size = sizes.sequences
    gc.collect()
    teacher, student = build(config, architecture, device)
    work = workload(config, teacher, student, batch)
    for parts in _time(teacher, student, batch, device, repeats, warmup):
        figures = _figures(config, sizes, f"{config.target.name}, {depth}", batch, parts, work, device)
        figures.write(out)
    return figures


def limit_layers(config: Config, architecture: Any, num_layers: int | None) -> str:
    """Leaves so many text layers in an architecture; returns `2 of 28 text layers`."""
    text = architecture.get_text_config()
    complete = text.num_hidden_layers
    if num_layers is not None and not 1 <= num_layers <= complete:
        raise ValueError(f"--layers {num_layers}: {config.target.name} takes 1 to {complete}")
    text.num_hidden_layers = num_layers or complete
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    return f"{text.num_hidden_layers} of {complete} text layers"


def workload(config: Config, teacher: Teacher, student: Student, batch: dict[str, Any]) -> Workload:
    """Returns what the plan knows of a micro-batch."""
    share = float(teacher.target.family.visual_mask(batch["input_ids"]).float().mean())
    models = MetaModels(target=teacher.target, draft=student.decoding_draft)
    return Workload(config=config, models=models, ranks=1, visual_share=share)


def build(config: Config, architecture: Any, device: torch.device) -> tuple[Teacher, Student]:
    """Returns a teacher and a student with random weights, with the attention that the device would have in a run."""
    dtype = torch_dtype(config.target.dtype)
    with device:
        target = sage.Target(family_of(architecture).auto_class.from_config(architecture, dtype=dtype))
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
        found = load_processor(path).image_processor
    else:
        classes = IMAGE_PROCESSOR_MAPPING_NAMES.get(architecture.model_type)
        found = None if classes is None else get_image_processor_class_from_name(classes["pil"])()
    if found is None:
        raise ValueError(f"--images: {architecture.model_type} takes no images; choose a vision-language target")
    return found


def make_batch(family: Any, processor: Any, sizes: Sizes) -> dict[str, Any]:
    """Returns a micro-batch of random tokens; each sequence begins with the same image and ends with its supervised tokens."""
    image = Image.effect_noise(sizes.image, 64).convert("RGB")
    pixels, (text,) = family.encode_images(processor, [image])
    count = text.count(family.placeholders["image"])
    if count + 2 >= sizes.length:
        raise ValueError(f"--images: an image takes {count} tokens; --length {sizes.length} is too short")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(1000, min(family.slots.values())), (sizes.sequences, sizes.length), generator=generator)
    ids[:, 1 : 1 + count] = family.slots["image"]
    first = sizes.length - int((sizes.length - count - 1) * sizes.supervised)
    mask = (torch.arange(sizes.length) >= first).expand_as(ids)
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


def _time(
    teacher: Teacher, student: Student, batch: dict[str, Any], device: torch.device, repeats: int, warmup: int
) -> Iterator[dict[str, Measured]]:
    """Yields times and memory of every part after each timed repeat; the clock waits for the device at its bounds."""
    staged = Staging(teacher.target, device, teacher.target.dtype)(batch)
    parts = {name: Measured() for name in PARTS}
    for number in range(warmup + repeats):
        seconds = dict.fromkeys(PARTS, 0.0)
        run_parts(teacher, student, staged, partial(_timed, device=device, seconds=seconds, parts=parts))
        if number >= warmup:
            for name, spent in seconds.items():
                parts[name].seconds.append(spent)
            yield parts


@contextmanager
def _timed(name: str, device: torch.device, seconds: dict[str, float], parts: dict[str, Measured]) -> Iterator[None]:
    reset_peak(device)
    start = now_s(device)
    yield
    seconds[name] += now_s(device) - start
    parts[name].peak_bytes = max(parts[name].peak_bytes, peak(device))


def _figures(
    config: Config,
    sizes: Sizes,
    name: str,
    batch: dict[str, Any],
    parts: dict[str, Measured],
    work: Workload,
    device: torch.device,
) -> Figures:
    plan, peak_flops = flops_of_step(work), config.launch.gpu_peak_tflops * 1e12
    total = Measured(
        seconds=[sum(times) for times in zip(*(one.seconds for one in parts.values()), strict=True)],
        peak_bytes=max(one.peak_bytes for one in parts.values()),
    )
    rows = [_row(PARTS[name], one, plan[name], peak_flops) for name, one in parts.items()]
    rows.append(_row("sum", total, sum(plan.values()), peak_flops))
    tokens = batch["input_ids"].numel()
    width, height = sizes.image
    title = (
        f"{name}, draft={config.draft.kind}, {config.objective.steps} step(s), {config.train.precision}: "
        f"{sizes.sequences} sequences with an image of {width} x {height}"
    )
    supervised = int(count_supervised(batch["loss_mask"]))
    notes = [
        f"{tokens} tokens, {work.visual_share:.2f} visual, {supervised} supervised",
        f"the plan takes the {round((1 - work.visual_share) * tokens)} tokens of text to be supervised; "
        f"share of {config.launch.gpu_peak_tflops:g} TFLOP/s (launch.gpu_peak_tflops)",
        f"{tokens / median(total.seconds):,.0f} tokens/s without the optimizer",
    ]
    return Figures(title, HEAD, rows, notes, describe_machine(device))


def _row(name: str, one: Measured, flops: float, peak_flops: float) -> list[str]:
    seconds = median(one.seconds)
    share = f"{flops / seconds / peak_flops:.0%}"
    return [name, f"{flops / 1e12:.4g}", f"{1e3 * seconds:.1f}", share, f"{one.peak_bytes / GIB:.1f}"]

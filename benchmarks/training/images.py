"""Operations, operators, time and memory of the parts of a training step on sequences with one image each.

Operations and operators are counted without weights, on any machine, beside the formula of the plan (docs/plan.md); times, the
share of the peak and memory are measured on a GPU with random weights.

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
from torch import Tensor
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES, get_image_processor_class_from_name

import sage
from benchmarks.figures import Figures
from benchmarks.training.compiled_calls import LayerCalls
from benchmarks.training.counting import Counts, counted, weightless
from benchmarks.training.measuring import GIB, describe_machine, peak, reset_peak
from sage.io.dtypes import torch_dtype
from sage.runtime.attention import HALF
from sage.runtime.timing import now_s
from sage.runtime.vision_attention import VisionAttention, resolve_attention
from sage.targets.families import family_of
from sage.targets.loading import load_processor, set_attention
from train.config.schema import Config
from train.distill.build import fresh_draft, new_student
from train.distill.compiled_layers import CompiledLayers, draft_layers, target_methods
from train.distill.pairs import count_supervised
from train.distill.staging import Staging
from train.distill.student import Student, supervised_features
from train.distill.teacher import Teacher
from train.job.build import build_teacher
from train.plan.memory import Workload
from train.plan.meta import MetaModels, target_architecture
from train.plan.step_time import flops_of_step

META = torch.device("meta")
PARTS = {
    "vision": "vision tower, embedding",
    "text": "teacher's text layers",
    "draft": "draft, forward and backward",
    "objective": "objective",
}
HEAD = ("part", "TFLOP", "of the plan's", "operators", "compiled", "ms", "share of peak", "peak, GiB")
Part = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A micro-batch: tokens of its sequences, pixels of their images, and the supervised share of each sequence's text."""

    lengths: tuple[int, ...]
    image: tuple[int, int] = (640, 480)
    supervised: float = 0.25


@dataclass
class Measured:
    """What a part takes: operations and operators, seconds of each repeat, and the most bytes allocated during it.

    Attributes:
        compiled: calls with compiled layers (`benchmarks.training.compiled_calls`); None if it has none, or is differentiated.
    """

    counts: Counts = field(default_factory=Counts)
    compiled: int | None = None
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Images(Workload):
    """A workload with a given share of visual tokens."""

    share: float

    @property
    def visual_share(self) -> float:
        return self.share


def measure(config: Config, sizes: Sizes, num_layers: int | None, device: torch.device, repeats: int, warmup: int) -> Figures:
    """Counts a micro-batch, and on a GPU also times it.

    Args:
        config: names target, draft, objective and precision; the target's weights are random and are not loaded.
        num_layers: text layers of the target; None for all.

    Raises:
        ValueError: a target without images, or an image that is longer than a sequence.
    """
    architecture = target_architecture(config.target)
    text = architecture.get_text_config()
    complete = text.num_hidden_layers
    if num_layers is not None and not 1 <= num_layers <= complete:
        raise ValueError(f"--layers {num_layers}: {config.target.name} takes 1 to {complete}")
    text.num_hidden_layers = num_layers or complete
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    batch = make_batch(family_of(architecture), image_processor(config.target.path, architecture), sizes)
    config.data.max_length = max(sizes.lengths)
    config.train.global_batch_size = config.train.micro_batch_size = len(sizes.lengths)
    parts = {name: Measured() for name in PARTS}
    layers = LayerCalls()
    work = count(config, architecture, batch, {name: one.counts for name, one in parts.items()}, layers)
    for name, one in parts.items():
        one.compiled = layers.compiled(name, one.counts.operators)
    plan = flops_of_step(work)
    if device.type == "cuda":
        _time(config, architecture, batch, device, parts, repeats, warmup)
    return _figures(config, work, sizes, batch, parts, plan, device, f"{text.num_hidden_layers} of {complete} text layers")


def count(config: Config, architecture: Any, batch: dict[str, Any], counts: dict[str, Counts], layers: LayerCalls) -> Images:
    """Adds what a micro-batch takes to `counts` and `layers`, by part; returns what the plan knows of it."""

    @contextmanager
    def part(name: str) -> Iterator[None]:
        layers.part = name
        with counted(counts[name]) as layers.running:
            yield

    with weightless():
        teacher, student = build(config, architecture, META)
        teacher.layers = CompiledLayers(target_methods(teacher.target), layers.new)
        staged = Staging(teacher.target, torch.device("cpu"), torch_dtype(config.target.dtype))(batch)
        placed = {key: _on_meta(value) for key, value in staged.items()}
        run_parts(teacher, student, placed, part)
    models = MetaModels(target=teacher.target, draft=student.decoding_draft)
    share = float(teacher.target.family.visual_mask(batch["input_ids"]).float().mean())
    return Images(config=config, models=models, ranks=1, share=share)


def build(config: Config, architecture: Any, device: torch.device) -> tuple[Teacher, Student]:
    """Returns a teacher and a student with random weights, with the attention of a GPU."""
    dtype = torch_dtype(config.target.dtype)
    with device:
        target = sage.Target(family_of(architecture).auto_class.from_config(architecture, dtype=dtype))
    set_attention(
        target.model,
        resolve_attention(VisionAttention(config.target.attention), "cuda", dtype in HALF, target.family.is_packed, True),
    )
    size = getattr(config.draft, "draft_vocab_size", None)
    vocabulary = None if size is None or size >= target.vocab_size else torch.arange(size)
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
    """Returns a micro-batch of random tokens; each sequence begins with its image and ends with its supervised tokens.

    Tokens are right-padded to the longest sequence; all images are the same noise.
    """
    image = Image.effect_noise(sizes.image, 64).convert("RGB")
    pixels, (text,) = family.encode_images(processor, [image])
    count = text.count(family.placeholders["image"])
    longest = max(sizes.lengths)
    if count + 2 >= min(sizes.lengths):
        raise ValueError(f"--images: an image takes {count} tokens; --length {min(sizes.lengths)} is too short")
    generator = torch.Generator().manual_seed(0)
    shape = (len(sizes.lengths), longest)
    ids = torch.randint(min(1000, min(family.slots.values())), shape, generator=generator)
    ids[:, 1 : 1 + count] = family.slots["image"]
    place, length = torch.arange(longest), torch.tensor(sizes.lengths)[:, None]
    is_token = place < length
    first = length - ((length - count - 1) * sizes.supervised).long()
    tokens = {"input_ids": ids, "attention_mask": is_token.long(), "loss_mask": is_token & (place >= first)}
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


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and value.is_floating_point() else value


def _time(
    config: Config,
    architecture: Any,
    batch: dict[str, Any],
    device: torch.device,
    parts: dict[str, Measured],
    repeats: int,
    warmup: int,
) -> None:
    """Adds times and memory of every part; the clock waits for the device at its bounds."""
    gc.collect()
    teacher, student = build(config, architecture, device)
    staged = Staging(teacher.target, device, torch_dtype(config.target.dtype))(batch)
    for number in range(warmup + repeats):
        seconds = dict.fromkeys(PARTS, 0.0)
        run_parts(teacher, student, staged, partial(_timed, device=device, seconds=seconds, parts=parts))
        for name, spent in seconds.items() if number >= warmup else ():
            parts[name].seconds.append(spent)


@contextmanager
def _timed(name: str, device: torch.device, seconds: dict[str, float], parts: dict[str, Measured]) -> Iterator[None]:
    reset_peak(device)
    start = now_s(device)
    yield
    seconds[name] += now_s(device) - start
    parts[name].peak_bytes = max(parts[name].peak_bytes, peak(device))


def _figures(
    config: Config,
    work: Images,
    sizes: Sizes,
    batch: dict[str, Any],
    parts: dict[str, Measured],
    plan: dict[str, float],
    device: torch.device,
    layers: str,
) -> Figures:
    total, peak_flops = Measured(), config.launch.gpu_peak_tflops * 1e12
    rows = []
    for name, one in parts.items():
        total.counts.flops += one.counts.flops
        total.counts.operators += one.counts.operators
        total.peak_bytes = max(total.peak_bytes, one.peak_bytes)
        rows.append(_row(PARTS[name], one, plan[name], peak_flops))
    total.seconds = [sum(times) for times in zip(*(one.seconds for one in parts.values()), strict=True)]
    rows.append(_row("sum", total, sum(plan.values()), peak_flops))
    tokens, padded = int(batch["attention_mask"].sum()), batch["input_ids"].numel()
    width, height = sizes.image
    supervised = int(count_supervised(batch["loss_mask"]))
    title = (
        f"{config.target.name}, {layers}, draft={config.draft.kind}, {config.objective.steps} step(s), "
        f"{config.train.precision}: {len(sizes.lengths)} sequences with an image of {width} x {height}"
    )
    notes = [
        f"{tokens} tokens, {padded} with padding ({tokens / padded:.2f}); {work.share:.2f} visual, {supervised} supervised",
        f"the plan takes the {round((1 - work.share) * padded)} tokens of text to be supervised; "
        f"share of {config.launch.gpu_peak_tflops:g} TFLOP/s (launch.gpu_peak_tflops)",
    ]
    if total.seconds:
        notes.append(f"{tokens / median(total.seconds):,.0f} tokens/s without the optimizer")
    return Figures(title, HEAD, rows, notes, describe_machine(device))


def _row(name: str, one: Measured, plan: float, peak_flops: float) -> list[str]:
    flops = one.counts.flops
    counts = [name, f"{flops / 1e12:.4g}", f"{flops / plan:.2f}" if plan else "", f"{one.counts.operators}"]
    counts += ["" if one.compiled is None else f"{one.compiled}"]
    if not one.seconds:
        return [*counts, "", "", ""]
    seconds = median(one.seconds)
    return [*counts, f"{1e3 * seconds:.1f}", f"{flops / seconds / peak_flops:.0%}", f"{one.peak_bytes / GIB:.1f}"]

"""Renders a plan for a terminal. Owns the text only."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tqdm import tqdm

from checkpoints.export.serving import serving_line
from data_prep.dataset.dataset import Preparation
from data_prep.workers import loader_workers
from train.config.schema import RECIPE_LENGTH
from train.plan.estimate import LaunchPlan
from train.plan.memory import BYTES, WORKING, count, draft_rows
from train.state.resume import STATE_BYTES

TIGHT = 0.05  # of the memory
NO_GPU = "this machine has no GPU: the figures are those of GPUs as launch.gpu_* describe them; its CPU takes longer"
NAME_WIDTH = 22  # characters
MIN_GB_BYTES = 5e6  # smaller amounts are shown in MB


def render(plan: LaunchPlan) -> str:
    """Returns the complete plan as text, with what was found in the data."""
    config, models, data = plan.config, plan.models, plan.data
    head = f"plan: {config.draft.kind} draft for {config.target.name} on {plan.ranks} GPU(s), ZeRO {config.deepspeed.stage}"
    if config.launch.gpus is None and not torch.cuda.is_available():
        head += f"\n{NO_GPU}"
    vision, text = models.vision_parameters, models.target_parameters - models.vision_parameters
    parts = [f"{billions(vision)} vision, {billions(text)} text"] if vision else []
    if models.active_parameters < models.target_parameters:
        parts.append(f"{billions(models.active_parameters)} active per token")
    target = billions(models.target_parameters) + (f"   ({'; '.join(parts)})" if parts else "")
    total, trained = models.draft_parameters, models.trained_parameters
    draft = billions(total) if trained == total else f"{billions(total)}   ({billions(trained)} of them trained)"
    sections = {
        "parameters": [("target", target), ("draft", draft)],
        "memory per GPU": _memory(plan),
        "one optimizer step": _step(plan) + _image_size(plan),
        "run": _run(plan),
    } | ({"data": data.rows} if data else {})
    if data and data.preparation is not None:
        sections["data"] = [*data.rows, ("images", _images(plan, data.preparation))]
    lines = {title: [f"  {name:{NAME_WIDTH}}  {text}".rstrip() for name, text in rows] for title, rows in sections.items()}
    tables = ["\n".join([title, *rows]) for title, rows in lines.items()]
    serving = f"the draft {serving_line(models.draft, models.target.model.config)}"
    return "\n\n".join([head, *tables, serving, _verdict(plan)])


def _memory(plan: LaunchPlan) -> list[tuple[str, str]]:
    limit = f"{gigabytes(plan.total_bytes)} of {plan.config.launch.gpu_memory_gb:g} GB (launch.gpu_memory_gb)"
    validation = f"{gigabytes(plan.validation_bytes)}, when {', '.join(WORKING)} are free"
    parts = [(part, gigabytes(amount)) for part, amount in plan.memory.items() if amount]
    if linear := plan.models.target.linear:
        state, node = linear.num_bytes(BYTES[plan.config.target.dtype])
        parts.append(("linear layers", f"{gigabytes(state).strip()} per request, {gigabytes(node).strip()} per node of a tree"))
    return [*parts, ("in a validation", validation), ("total", limit)]


def _step(plan: LaunchPlan) -> list[tuple[str, str]]:
    config, launch = plan.config, plan.config.launch
    split = f"{plan.ranks} rank(s) x {plan.micro_batch_size} x {plan.accumulation} accumulated"
    tokens = config.train.global_batch_size * plan.length
    kind = "visual" if plan.extent else "assumed to be visual"
    visual = f", {plan.visual_share:.0%} of them {kind}" if plan.visual_share else ""
    rows = [
        ("batch", f"{config.train.global_batch_size} sequences = {split}"),
        ("tokens", f"at most {tokens:,} ({plan.length:,} per sequence{visual})"),
    ]
    for part, amount in plan.flops.items():
        if amount:
            each_s = plan.parts_s[part]
            share = f"{each_s / plan.step_s:.0%}"
            rows.append((part, f"{operations(amount)}, {plan.traffic[part] / 1e9:,.0f} GB: {seconds(each_s)} ({share})"))
    if plan.gather_s:
        group = f"{plan.sharding_ranks} ranks" + (" of each node" if plan.sharding_ranks < plan.ranks else "")
        rows.append(("gathering", f"{seconds(plan.gather_s)} of waiting for layers of the sharded target, held by {group}"))
    rows.append(("update", f"{seconds(plan.update_s)} for gradients, weights and the optimizer"))
    speed = f"{launch.gpu_tflops:g} TFLOP/s, {launch.gpu_tflops / launch.gpu_peak_tflops:.0%} of {launch.gpu_peak_tflops:g}"
    rows.append(("time", f"at most {seconds(plan.step_s)}, {plan.step_s / plan.floor_s:.2f} times the floor"))
    rows.append(("floor", f"{seconds(plan.floor_s)} at {speed} (launch.gpu_tflops, launch.gpu_peak_tflops)"))
    rows.append(("speed", f"{tokens / plan.step_s / plan.ranks:,.0f} tokens/s per GPU"))
    return rows


def _run(plan: LaunchPlan) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if (balance := plan.balance) is not None:
        speed = plan.config.train.global_batch_size * balance.mean_tokens / plan.data_step_s / plan.ranks
        rows += [
            ("these data", f"{balance.mean_tokens:,.0f} tokens per example, {balance.real_share:.0%} of the padded ones"),
            ("", f"{balance.efficiency:.0%} of what ranks could compute until the slowest one is done"),
            ("", f"{seconds(plan.data_step_s)} per step, {speed:,.0f} tokens/s per GPU"),
        ]
    train, recipe = plan.config.train, plan.config.target.recipe.micro_batch_size or 0
    if rows and train.micro_batch_tokens is None and train.micro_batch_size < recipe:
        budget = f"train.micro_batch_tokens={recipe * RECIPE_LENGTH}"
        rows.append(("", f"{train.micro_batch_size} example(s) per pass; {budget} fills passes of shorter ones"))
    training = "depends on the size of the data; give train.max_steps, train.max_minutes or data.num_examples for an estimate"
    if plan.num_steps is not None and plan.training_s is not None:
        training = f"{plan.num_steps:,} steps, {'at most ' if plan.balance is None else ''}{_clock(plan.training_s)}"
    state, draft = STATE_BYTES * plan.models.trained_parameters, BYTES[train.precision] * plan.models.draft_parameters
    saved = f"{gigabytes(state).strip()} per state, {gigabytes(draft).strip()} per draft"
    rows += [("training", training), ("on disk", saved), *_validations(plan), *_compressor(plan)]
    longest_s, part = max((plan.step_s, "one optimizer step"), (plan.validation_s, "one validation"))
    limit_s = plan.config.launch.timeout_s
    if plan.ranks > 1 and longest_s > limit_s:  # the limit of a collective operation
        rows.append(
            ("", f"warning: ranks wait for {part} longer than launch.timeout_s={limit_s}; give {2 * math.ceil(longest_s)}")
        )
    return rows


def _clock(amount_s: float) -> str:
    """Returns `12:18:13` or `04:13`."""
    return tqdm.format_interval(amount_s) if amount_s >= 1 else "less than a second"


def _validations(plan: LaunchPlan) -> list[tuple[str, str]]:
    decode = plan.config.decode
    decoders = ", ".join(dict.fromkeys(("autoregressive", *map(str, decode.policies), *map(str, decode.baselines))))
    where = "rank 0" if plan.validating_ranks == 1 else f"{plan.validating_ranks} ranks"
    prompts = f"{decode.num_prompts} prompts of at most {decode.max_new_tokens} tokens on {where}"
    rows = [("one validation", f"{_clock(plan.validation_s)}, {prompts}"), ("", f"by {decoders}")]
    if (share := plan.validation_share) is not None and plan.num_validations is not None:
        total = _clock(plan.validation_s * plan.num_validations)
        rows.append(("validations", f"{plan.num_validations} of them take {total}, {share:.0%} of the run"))
    if (smaller := plan.smaller_validation()) is not None:
        words, each_s = smaller
        rows.append(("", f"warning: more than a tenth; {' '.join(words)} takes {_clock(each_s)} each"))
    return rows


def _compressor(plan: LaunchPlan) -> list[tuple[str, str]]:
    """Returns what a compressor can save at most when the draft decodes."""
    network, visual = plan.models.draft.network, plan.num_visual
    rows = draft_rows(network, plan.length, visual)
    if rows == plan.length:
        return []
    head = plan.models.trained_parameters - count(network.compressor)
    share = head * (plan.length - rows) / (plan.models.text_parameters * plan.length)
    few = f"{visual:,} visual tokens of the draft become {rows - plan.length + visual:,}: at most {share:.1%} of a prefill"
    return [
        ("compressor", few),
        ("", "warning: a round gains no more; it pays in training, in decoding only if acceptance stays the same"),
    ]


def _image_size(plan: LaunchPlan) -> list[tuple[str, str]]:
    family, config = plan.models.target.family, plan.config.data
    is_published = not Path(plan.config.target.path).expanduser().is_dir()
    limits = plan.data.pixels if plan.data and plan.data.pixels else family.pixel_limits() if is_published else None
    if limits is None:
        return []
    low, high = (min(max(given or limit, limits[0]), limits[1])
                 for given, limit in zip((config.min_pixels, config.max_pixels), limits, strict=True))  # fmt: skip
    vision = family.config.vision_config
    area = (vision.patch_size * vision.spatial_merge_size) ** 2  # pixels of a visual token
    rows = [("an image", f"{low:,} to {high:,} pixels, at most {high // area:,} visual tokens (data.max_pixels)")]
    if config.max_length and high // area >= config.max_length:
        half = f"data.max_pixels={config.max_length // 2 * area} is half of it"
        rows.append(("", f"warning: more than data.max_length={config.max_length}; {half}"))
    return rows


def _images(plan: LaunchPlan, preparation: Preparation) -> str:
    workers = loader_workers(plan.config.data.num_workers, plan.ranks_per_node)
    per_step_s = plan.config.train.global_batch_size / plan.ranks * preparation.images * preparation.image_s
    needed = per_step_s / plan.data_step_s
    whose = f"{workers} worker(s) per rank" if workers else "the thread beside training"
    share = f"{needed / max(1, workers):.0%} of the time of {whose} (data.num_workers)"
    more = "" if needed <= max(1, workers) else f"; training waits for them, {math.ceil(needed)} would be enough"
    return f"{1e3 * preparation.image_s:.0f} ms of a core of this machine each, {share}{more}"


def _verdict(plan: LaunchPlan) -> str:
    data, spare = plan.data, plan.limit_bytes - plan.total_bytes
    amount = gigabytes(abs(spare)).strip()
    if 0 <= spare < TIGHT * plan.limit_bytes:  # less than estimates are exact
        fit = f"tight: {amount} to spare, less than {TIGHT:.0%}. Activations and time are estimates."
    elif plan.fits:
        fit = f"fits: {amount} to spare. Parameters are exact; activations and time are estimates."
    elif plan.change is None:
        fit = f"does not fit: {amount} too much; no change of batch, chunk, ZeRO stage or number of GPUs makes it fit"
    else:
        fit = f"does not fit: {amount} too much; it fits with {' '.join(plan.change)}"
    if data and data.refusal:
        return f"refused: {data.refusal}\n{fit}"
    dropped_share = data.dropped_share if data else 0.0
    return fit + (f"\n{dropped_share:.0%} of the examples are dropped (data.max_length)" if dropped_share else "")


def billions(parameters: int) -> str:
    """Returns `8.29 B` or `231.2 M`."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def gigabytes(amount: float) -> str:
    """Returns bytes as `16.58 GB` (10^9)."""
    return f"{amount / 1e9:6.2f} GB" if amount >= MIN_GB_BYTES else f"{amount / 1e6:6.2f} MB"


def operations(amount: float) -> str:
    """Returns floating-point operations as `1,478 TFLOP` or `310 GFLOP`."""
    return f"{amount / 1e12:,.0f} TFLOP" if amount >= 1e12 else f"{amount / 1e9:,.0f} GFLOP"


def seconds(amount: float) -> str:
    """Returns `12.3 s` or `4.1 ms`."""
    return f"{amount:.1f} s" if amount >= 1 else f"{1e3 * amount:.1f} ms"

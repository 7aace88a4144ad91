"""`launch.plan=true`: what a run would need, before anything is loaded: parameters, memory per GPU, tokens, time, does it fit.

Owns: the arithmetic of memory and time, the search for a change that would make a run fit. Does not own: the shapes
(train.plan.meta), what is printed (train.plan.text).

Parameters are exact. Memory of activations and time are estimates from shapes, for the longest examples the data may have:
every sequence at `data.max_length`, `VISUAL_SHARE` of its tokens visual, the rest supervised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from sage.drafts.compressor.operators import Conv, Resampler
from train.config.checks import MAX_STAGE, check_batch, check_deepspeed
from train.config.schema import Config, ConfigError, Offload, Precision
from train.plan.meta import Pair, build_on_meta

BYTES = {Precision.fp32: 4, Precision.bf16: 2}
MASTER = 4  # bytes of a float32 master weight, and of each of AdamW's two moments
VISUAL_SHARE = 0.5
DEFAULT_LENGTH = 4096  # where `data.max_length` sets no limit
RESERVE = 1.5e9  # the CUDA context, NCCL's buffers, cuBLAS workspaces
FRAGMENTATION = 0.1  # of what is allocated and freed in every step, lost between blocks
CHUNK_BYTES = 14  # per logit of a chunk: both sides in float32, one of them being computed
GATHER_BYTES_PER_S = 100e9  # what a rank receives of a sharded target, over NVLink; over a network far less
BACKWARD = 2  # a backward pass costs so many forward passes
MOST_GPUS = 64


@dataclass(kw_only=True)
class Plan:
    """What a run needs. `memory` is bytes per GPU by part; `change` are overrides that make it fit, None where none do."""

    config: Config
    ranks: int
    accumulation: int
    pair: Pair
    memory: dict[str, float] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    gather_s: float = 0.0
    change: list[str] | None = None

    @property
    def total(self) -> float:
        return sum(self.memory.values())

    @property
    def limit(self) -> float:
        return self.config.launch.gpu_memory_gb * 1e9

    @property
    def fits(self) -> bool:
        return self.total <= self.limit

    @property
    def length(self) -> int:
        """Tokens of the longest example."""
        return self.config.data.max_length or DEFAULT_LENGTH

    @property
    def visual(self) -> int:
        """How many of them are visual."""
        return int(self.length * VISUAL_SHARE)

    @property
    def step_s(self) -> float:
        """Seconds per optimizer step."""
        computing = sum(self.flops.values()) / (self.ranks * self.config.launch.gpu_tflops * 1e12)
        return computing + self.gather_s

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the whole run, where the configuration alone says so."""
        train, examples = self.config.train, self.config.data.num_examples
        by_epochs = math.ceil(train.epochs * examples / train.global_batch_size) if train.epochs and examples else None
        known = [steps for steps in (by_epochs, train.max_steps) if steps is not None]
        is_open = train.epochs is not None and not examples and train.max_steps is None
        return None if is_open or not known else min(known)


def plan(config: Config) -> Plan:
    """The plan of a run, with a change that would make it fit where it does not.

    Raises:
        ConfigError: the global batch does not split evenly, or the target's architecture is not at hand.
    """
    pair, ranks = build_on_meta(config), config.launch.gpus or config.launch.ranks or 1
    made = estimate(config, pair, ranks)
    if not made.fits:
        made.change = find_change(made)
    return made


def estimate(config: Config, pair: Pair, ranks: int) -> Plan:
    """The arithmetic alone."""
    made = Plan(config=config, ranks=ranks, accumulation=check_batch(config, ranks), pair=pair)
    states = {**_target_memory(made), **draft_memory(config, pair.draft_parameters, pair.trained_parameters, ranks)}
    working = {"activations": _activations(made), "objective": _objective(made)}
    lost = FRAGMENTATION * sum(working.values())
    made.memory = {**states, **working, "fragmentation": lost, "CUDA context, NCCL": RESERVE}
    made.flops = _flops(made)
    if config.deepspeed.shard_target:
        received = pair.layers_parameters * BYTES[config.target.dtype] * (ranks - 1) / ranks
        made.gather_s = made.accumulation * received / GATHER_BYTES_PER_S
    return made


def _target_memory(made: Plan) -> dict[str, float]:
    """The target whole, or its text layers in parts (`sharded_teacher`), two of them gathered: in use, and the next."""
    size, pair = BYTES[made.config.target.dtype], made.pair
    if not made.config.deepspeed.shard_target:
        return {"target weights, whole": pair.target_parameters * size}
    return {
        "target, kept whole": (pair.target_parameters - pair.layers_parameters) * size,
        f"target layers, 1/{made.ranks}": pair.layers_parameters * size / made.ranks,
        "target layers gathered": 2 * pair.layers_parameters * size / pair.target.num_layers,
    }


def draft_memory(config: Config, parameters: int, trained: int, ranks: int) -> dict[str, float]:
    """Bytes per rank of a draft's weights, gradients and AdamW states under the chosen ZeRO stage.

    Args:
        parameters: of the whole draft; `trained` of them have gradients and optimizer states.

    Ref: ZeRO, arXiv 1910.02054, section 3.1. Stage 1 spreads the optimizer states, 2 the gradients as well, 3 the weights.
    """
    stage, size = config.deepspeed.stage, BYTES[config.train.precision]
    has_masters = stage > 0 or config.train.precision is not Precision.fp32
    optimizer = trained * MASTER * (2 + has_masters) / (ranks if stage >= 1 else 1)
    gradients = trained * (size if stage else MASTER) / (ranks if stage >= 2 else 1)
    bucket = config.deepspeed.bucket_elements * size * (2 if config.deepspeed.overlap_comm else 1) if stage else 0
    return {
        "draft weights": parameters * size / (ranks if stage >= MAX_STAGE else 1),
        "draft gradients": gradients,
        "AdamW, masters": 0.0 if config.deepspeed.offload_optimizer is Offload.cpu else optimizer,
        "gradient buckets": bucket,
    }


def _activations(made: Plan) -> float:
    """The larger of the target's working set and what the draft keeps for its backward pass, and the features held for it."""
    target, config = made.pair.target, made.config
    tokens = config.train.micro_batch_size * made.length
    text, size = target.text_config, BYTES[config.target.dtype]
    hidden, wide = target.hidden_size, int(text.intermediate_size)
    mask = config.train.micro_batch_size * made.length**2
    reading = tokens * size * (3 * hidden + 3 * wide) + mask
    held = tokens * size * hidden * (2 + len(_levels(made)))
    drafting = draft_activations(made, config.train.micro_batch_size, made.length, made.visual)
    return held + max(reading, _vision(made), drafting)


def _vision(made: Plan) -> float:
    """The vision tower's working set: pixels and one layer's intermediate results."""
    vision, size = made.pair.target.model.config.vision_config, BYTES[made.config.target.dtype]
    merged = getattr(vision, "spatial_merge_size", 1) ** 2
    patches = made.config.train.micro_batch_size * made.length * VISUAL_SHARE * merged
    pixels = 3 * vision.patch_size**2 * getattr(vision, "temporal_patch_size", 1)
    return patches * (pixels * MASTER + size * 3 * (vision.hidden_size + vision.intermediate_size))


def draft_activations(made: Plan, batch: int, length: int, visual: int) -> float:
    """What autograd keeps of the draft's forward passes over sequences of `length` pairs, `visual` of them one picture's.

    A layer keeps its residual and normed states (about seven of the hidden size), attention's inputs before and after the rope
    and its output, and the four factors of the gated block. Features are fused before a compressor makes them fewer; its
    learned operators keep what they read, embedding and feature side by side.
    """
    draft, size = made.pair.draft, BYTES[made.config.train.precision]
    sizes = getattr(draft.config, "text_config", draft.config)
    layers = getattr(sizes, "num_hidden_layers", 1) if sizes is not draft.config else 1
    heads = sizes.num_attention_heads + sizes.num_key_value_heads
    head_dim = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    per_layer = 7 * sizes.hidden_size + 4 * sizes.intermediate_size + 3 * heads * head_dim
    levels, read = len(_levels(made)), _rows(draft, length, visual)
    learned = sum(isinstance(part, (Conv, Resampler)) for part in draft.modules())
    inputs = (length * levels if levels else read * 2) + visual * 2 * learned
    return batch * size * (inputs * sizes.hidden_size + read * made.config.objective.steps * layers * per_layer)


def _rows(draft: Any, length: int, visual: int) -> int:
    """What a draft's layer reads of a sequence of `length` pairs."""
    compressor = getattr(draft, "compressor", None)
    return length if compressor is None else length - visual + int(compressor.count(visual))


def _objective(made: Plan) -> float:
    """Logits of one chunk on both sides; the supervised states of every step with their gradient; that of an own lm_head."""
    config, size = made.config, BYTES[made.config.train.precision]
    supervised = config.train.micro_batch_size * made.length * (1 - VISUAL_SHARE)
    chunk = min(config.objective.chunk_tokens, supervised) * _words(made) * CHUNK_BYTES
    states = (1 + 2 * config.objective.steps) * supervised * made.pair.target.hidden_size * size
    return chunk + states + _has_own_head(made) * _words(made) * made.pair.target.hidden_size * size


def _flops(made: Plan) -> dict[str, float]:
    """Floating-point operations of one optimizer step over all ranks."""
    target, config, pair = made.pair.target, made.config, made.pair
    tokens = config.train.global_batch_size * made.length
    merged = getattr(target.model.config.vision_config, "spatial_merge_size", 1) ** 2
    text = pair.target_parameters - pair.vision_parameters - target.vocab_size * target.hidden_size
    attention = 2 * made.length * target.hidden_size * target.num_layers  # causal: half of the pairs, QK and AV
    logits = 2 * _words(made) * target.hidden_size * tokens * (1 - VISUAL_SHARE)
    steps, read = config.objective.steps, _rows(pair.draft, made.length, made.visual) / made.length
    return {
        "vision": 2 * pair.vision_parameters * tokens * VISUAL_SHARE * merged,
        "text": (2 * text + attention) * tokens,
        "draft": 2 * pair.draft_parameters * tokens * read * steps * (1 + BACKWARD),
        # the teacher's once; at each step the draft's, the gradient back through its lm_head, and that of an own lm_head
        "objective": logits * (1 + (2 + _has_own_head(made)) * steps),
    }


def _levels(made: Plan) -> tuple[int, ...]:
    return tuple(getattr(made.pair.draft, "levels", ()))


def _words(made: Plan) -> int:
    """What the draft may say."""
    return getattr(made.config.draft, "draft_vocab_size", None) or made.pair.target.vocab_size


def _has_own_head(made: Plan) -> bool:
    """Whether the draft's lm_head is its own and trained; EAGLE borrows the target's."""
    return hasattr(made.pair.draft, "lm_head")


# -- the change that would make it fit ---------------------------------------------------------------------------------------


def find_change(made: Plan) -> list[str] | None:
    """The fewest overrides that make the run fit, the mildest first; None where no combination does."""
    kinds = _changes(made.config, made.ranks)
    *own, gpus = kinds
    strongest = [kind[-1] for kind in own]
    if not any(_is_enough(made, [*strongest, *more]) for more in [[], *([number] for number in gpus)]):
        return None  # not even with all of them together
    for number in range(1, len(kinds) + 1):
        for chosen in itertools.combinations(kinds, number):
            for change in itertools.product(*chosen):
                if _fits_with(made, list(change)):
                    return list(change)
    return None


def _changes(config: Config, ranks: int) -> list[list[str]]:
    """What could be changed without changing what is learnt, each from mild to strong; the number of GPUs last."""
    micro, chunk, stage = config.train.micro_batch_size, config.objective.chunk_tokens, config.deepspeed.stage
    kinds = [
        [f"objective.chunk_tokens={size}" for size in halves(chunk, 128)],
        [f"train.micro_batch_size={size}" for size in halves(micro, 1)],
        [f"deepspeed=zero{higher}" for higher in range(stage + 1, MAX_STAGE + 1)],
        [] if config.deepspeed.shard_target else ["deepspeed.shard_target=true"],
        ["deepspeed.offload_optimizer=cpu"] if stage and config.deepspeed.offload_optimizer is Offload.none else [],
    ]
    return [*(kind for kind in kinds if kind), [f"launch.gpus={more}" for more in doubles(ranks, MOST_GPUS)]]


def halves(value: int, lowest: int) -> Iterator[int]:
    """value / 2, value / 4, ... down to `lowest`."""
    while value // 2 >= lowest:
        value //= 2
        yield value


def doubles(value: int, highest: int) -> Iterator[int]:
    """2 * value, 4 * value, ... up to `highest`."""
    while value * 2 <= highest:
        value *= 2
        yield value


def _fits_with(made: Plan, change: list[str]) -> bool:
    """Whether a change is allowed and makes the run fit."""
    try:
        check_deepspeed(*_changed(made, change))
    except ConfigError:
        return False
    return _is_enough(made, change)


def _is_enough(made: Plan, change: list[str]) -> bool:
    """Whether the run would fit, allowed or not."""
    config, ranks = _changed(made, change)
    try:
        return estimate(config, made.pair, ranks).fits
    except ConfigError:  # the batch does not split among so many
        return False


def _changed(made: Plan, change: list[str]) -> tuple[Config, int]:
    """The configuration with these overrides, and its number of ranks."""
    config = deepcopy(made.config)
    ranks = made.ranks
    for override in change:
        key, _, value = override.partition("=")
        if key == "launch.gpus":
            ranks = int(value)
        elif key == "deepspeed":
            config.deepspeed.stage = int(value.removeprefix("zero"))
        else:
            _set(config, key, value)
    return config, ranks


def _set(config: Any, key: str, value: str) -> None:
    group, _, name = key.rpartition(".")
    part = OmegaConf.structured(getattr(config, group))
    part[name] = value
    setattr(config, group, OmegaConf.to_object(part))

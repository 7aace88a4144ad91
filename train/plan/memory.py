"""Target and draft of a run without weights, and memory per GPU by component; formulas in docs/plan.md.

Weights, gradients and optimizer states are exact, activations are estimates for the longest examples (`Workload`). The
architectures of the presets are in conf/target, so that a plan needs no hub.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

import sage
from sage.drafts.compressor import Conv, Resampler
from sage.drafts.draft import Draft, open_draft
from sage.drafts.head import DraftHead
from sage.drafts.location import find_draft
from sage.drafts.registry import KINDS, SlotOptions
from sage.drafts.unroll import EXTRA
from sage.io.files import config_dir
from sage.runtime.captured import MAX_FREE
from sage.targets.loading import meta_target, read_architecture
from sage.targets.target import layer_sizes
from sage.targets.weights import quantized_at_load, weight_bytes
from sage.trees import AUTOREGRESSIVE
from sage.trees import policy as new_policy
from train.config.checks import MAX_STAGE
from train.config.derived import sharding_ranks, zero_stage
from train.config.schema import Config, Device, Offload, OptimizerKind, Precision, TargetConfig
from train.distill.build import check_kind, fresh_draft, new_student, vocabulary_size
from train.distill.chunked_loss import BLOCK_LOGITS
from train.distill.rows import MAX_ROOTS
from train.engine.optimizers import matrices_of

BYTES = {Precision.fp32: 4, Precision.bf16: 2}
MASTER_BYTES = 4  # of a float32 master weight, and of each moment: two of AdamW, one of a matrix under Muon
VISUAL_SHARE, TEXT_TOKENS = 0.5, 2048  # assumed: half of the tokens are visual, and all but so many of a longer example
DEFAULT_LENGTH = 4096  # if `data.max_length` sets no limit
RESERVED = {"CUDA context, NCCL": 1.5e9, "Python, libraries": 0.6e9}  # of a process: with the workspaces of cuBLAS; on a CPU
FRAGMENTATION = 0.1  # share of the memory allocated and freed in every step that is lost between blocks
WORKING = ("activations", "objective", "fragmentation")  # components that are free between two steps
GRAPH_BYTES = 0.5e9  # CUDA graphs of a validation, their memory pool and workspaces
BLOCK_BYTES = 6 * 4  # per logit of a block of the objective: arrays in float32


@dataclass(kw_only=True)
class MetaModels:
    """A target and its draft on the meta device, and numbers of their parameters."""

    target: sage.Target
    draft: Draft

    def __post_init__(self) -> None:
        target, network, lm_head = self.target, self.draft.network, self.target.lm_head.weight
        head_parameters = int(lm_head.numel())
        own_head = 0 if lm_head is target.embed_tokens.weight else head_parameters
        self.target_parameters = count(target.model)
        self.active_parameters = target.family.active_parameters(target.model)  # of a token; fewer in a mixture of experts
        self.vision_parameters = self.target_parameters - count(target.text_model) - own_head
        self.read_parameters = self.active_parameters - self.vision_parameters - own_head  # by a pass over a token
        self.text_parameters = self.read_parameters - head_parameters  # of the text layers that a token uses
        self.layers_parameters = count(target.text_model.layers)  # which `deepspeed.shard_target` shards
        self.draft_parameters = count(network)
        self.trained_parameters = sum(p.numel() for p in network.parameters() if p.requires_grad)
        context = network.named_parameters() if isinstance(network, DraftHead) else ()
        # of a head that reads every pair, also one from which nothing is drafted
        self.context_parameters = sum(value.numel() for name, value in context if network.is_of_context(name))

    def muon_matrices(self, config: Config) -> list[tuple[int, int]]:
        """Rows and columns of the matrices that Muon trains; empty without Muon."""
        if config.optim.kind is not OptimizerKind.muon:
            return []
        return [(matrix.shape[0], matrix.shape[1]) for matrix in matrices_of(self.draft.network)]


def count(module: nn.Module) -> int:
    """Returns the number of parameters; tied ones count once."""
    return sum(p.numel() for p in module.parameters())


def build_on_meta(config: Config) -> MetaModels:
    """Returns target and draft of a run without weights; trained parameters of the draft require gradients.

    ValueError if `draft.path` holds no draft, or one of another kind (ConfigError), or the draft does not fit the target.
    """
    architecture, chosen = target_architecture(config.target), config.draft
    if config.target.quantize:
        architecture.quantization_config = quantized_at_load(config.target.quantize, config.target.path, architecture)
    target = meta_target(architecture)
    if chosen.path is None:
        size = vocabulary_size(chosen, target)
        draft = fresh_draft(config, target, None if size == target.vocab_size else torch.arange(size))
    else:
        draft = open_draft(find_draft(chosen.path, "draft.path"), target, torch.float32)
    check_kind(chosen, draft)
    return MetaModels(target=target, draft=new_student(draft, config).decoding_draft)


def target_architecture(target: TargetConfig) -> PreTrainedConfig:
    """Returns the configuration of a target: from a local folder, the hub's cache, conf/target, or else the hub.

    ValueError if none of them has it.
    """
    path, revision = target.path, target.revision
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    if Path(path).expanduser().is_dir():
        return read_architecture(path, "target.path")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, **options)
    except OSError:
        pass
    if revision is None and (shipped := _shipped_architectures().get(path)):
        return AutoConfig.for_model(**shipped)
    return read_architecture(path, "target.path", **options)


@cache
def _shipped_architectures() -> dict[str, dict[str, Any]]:
    """Returns hub id -> `target.architecture` of the files in conf/target, whatever the name of the chosen target."""
    files = [OmegaConf.load(path) for path in sorted((config_dir() / "target").glob("*.yaml"))]
    targets: list[Any] = [OmegaConf.to_container(file) for file in files]
    return {target["path"]: target["architecture"] for target in targets if "architecture" in target}


# -- memory -----------------------------------------------------------------------------------------------------------------


class Extent(NamedTuple):
    """The most tokens that an example of the data has: in all, visual ones, and from the first answer on."""

    length: int
    visual: int
    supervised: int


@dataclass(kw_only=True)
class Workload:
    """A configuration, its models, and the longest example: that of the data, or the longest that the configuration allows.

    Attributes:
        visual_share: of the tokens of the longest example; NaN stands for that of `extent`, or an assumption.
        length: tokens of the longest example, `num_visual` of them visual, `supervised_share` supervised.
        num_roots: pairs of the longest example from which drafts are unrolled; for unknown data those of a text alone.
        drafted_share: of the tokens from which drafts are trained, beyond the first unrolled step: text, or anchors in it.
        steps: predictions from each position, as of `steps_per_anchor`.
    """

    config: Config
    models: MetaModels
    ranks: int
    extent: Extent | None = None
    visual_share: float = math.nan

    def __post_init__(self) -> None:
        config, target, network, extent = self.config, self.models.target, self.models.draft.network, self.extent
        self.length = length = extent.length if extent else config.data.max_length or DEFAULT_LENGTH
        if not target.family.placeholders:
            self.visual_share = 0.0
        elif math.isnan(self.visual_share):
            self.visual_share = extent.visual / length if extent else max(VISUAL_SHARE, 1 - TEXT_TOKENS / length)
        self.num_visual = int(length * self.visual_share)
        self.supervised_share = extent.supervised / length if extent else 1 - self.visual_share
        roots, anchors = extent.supervised if extent else DEFAULT_LENGTH, config.objective.anchors
        self.num_roots = roots if roots <= MAX_ROOTS * length else length
        self.drafted_share = self.supervised_share if anchors is None else min(self.supervised_share, anchors / length)
        budget = config.train.micro_batch_tokens
        self.micro_batch_tokens = config.train.micro_batch_size * length if budget is None else max(budget, length)
        self.micro_batch_size = -(-self.micro_batch_tokens // length)
        self.steps = steps_per_anchor(config, network)
        self.draft_vocab_size: int = getattr(network.config, "draft_vocab_size", None) or target.vocab_size
        self.ranks_per_node = min(self.ranks, config.launch.gpus_per_node)
        self.layers_bytes = self.models.layers_parameters * BYTES[config.target.dtype]
        self.sharding_ranks = sharding_ranks(config, self.layers_bytes, self.ranks, self.ranks_per_node)
        self.flops_per_s, self.bytes_per_s = config.launch.gpu_tflops * 1e12, config.launch.gpu_gb_per_s * 1e9
        self.vision = getattr(target.model.config, "vision_config", None)
        self.patches_per_token = int(getattr(self.vision, "spatial_merge_size", 1) ** 2)


def memory_per_gpu(work: Workload) -> dict[str, float]:
    """Returns bytes by component."""
    config, models = work.config, work.models
    matrices = sum(rows * columns for rows, columns in models.muon_matrices(config))
    draft = draft_memory(config, models.draft_parameters, models.trained_parameters, work.ranks, matrices)
    working = {"activations": _activations(work), "objective": _objective(work)}
    lost = FRAGMENTATION * sum(working.values())
    reserved = "Python, libraries" if config.launch.device is Device.cpu else "CUDA context, NCCL"
    full, size = models.target.vocab_size, BYTES[config.target.dtype]
    head = work.draft_vocab_size * models.target.hidden_size * size if work.draft_vocab_size < full else 0
    draft |= {"lm_head, draft's rows": head}
    return {**_target_memory(work), **draft, **working, "fragmentation": lost, reserved: RESERVED[reserved]}


def validation_memory(work: Workload) -> float:
    """Returns bytes of a validation: the draft as it is decoded, caches, the prefill of the longest prompt, captured graphs."""
    target, draft, size = work.models.target, work.models.draft.network, BYTES[work.config.target.dtype]
    tokens = work.length + work.config.decode.max_new_tokens
    decode, shape = work.config.decode, draft_layers(draft)
    nodes = max(new_policy(name, **decode.options.get(name, {})).tree_capacity for name in (AUTOREGRESSIVE, *decode.policies))
    caches = MAX_FREE * (target.cache_bytes(tokens, nodes, size) + tokens * 2 * size * shape.depth * shape.keys)
    features = (2 + len(work.models.draft.levels)) * target.hidden_size
    text = 3 * (target.hidden_size + target.family.mlp_width)
    prefill = work.length * size * features + max(work.length * size * text, _vision(work) / work.micro_batch_size)
    return work.models.draft_parameters * size + caches + prefill + GRAPH_BYTES


def _target_memory(work: Workload) -> dict[str, float]:
    """Weights of the target; with `deepspeed.shard_target` two of its text layers are gathered: the current and the next."""
    size, models = BYTES[work.config.target.dtype], work.models
    if not work.config.deepspeed.shard_target:
        return {"target weights": weight_bytes(models.target.model, size)}
    return {
        "target, not sharded": (models.target_parameters - models.layers_parameters) * size,
        f"target layers, 1/{work.sharding_ranks}": work.layers_bytes / work.sharding_ranks,
        "target layers gathered": 2 * work.layers_bytes / models.target.num_layers,
    }


def draft_memory(config: Config, parameters: int, trained: int, ranks: int, matrices: int = 0) -> dict[str, float]:
    """Returns bytes per rank of the draft's weights, gradients and optimizer states under the chosen ZeRO stage.

    Of its `parameters`, only the `trained` ones have gradients and optimizer states, those of `matrices` under Muon one moment.
    Ref: ZeRO, arXiv 1910.02054, section 3.1. Stage 1 shards the optimizer states, 2 the gradients as well, 3 the weights.
    """
    stage, size = zero_stage(config), BYTES[config.train.precision]
    optimizer = MASTER_BYTES * ((3 if stage else 2) * trained - matrices) / (ranks if stage >= 1 else 1)
    own_sum = size if stage == 1 and size < MASTER_BYTES else 0  # the bf16 gradient of a micro-batch, kept beside the sum
    gradients = trained * (MASTER_BYTES + own_sum) / (ranks if stage >= 2 else 1)
    filled = min(config.deepspeed.bucket_elements, trained)
    elements = filled if config.launch.device is Device.cpu else config.deepspeed.bucket_elements  # a CPU has what is written
    bucket = elements * size * (2 if config.deepspeed.overlap_comm else 1) if stage else 0
    reduced = filled * MASTER_BYTES if size < MASTER_BYTES else 0
    return {
        "draft weights": parameters * size / (ranks if stage >= MAX_STAGE else 1),
        "draft gradients": gradients,
        "optimizer, masters": 0.0 if config.deepspeed.offload_optimizer is Offload.cpu else optimizer,
        "gradient buckets": bucket + reduced,
    }


def _activations(work: Workload) -> float:
    """The features kept for the draft, and the largest of three working sets: target, vision tower, draft."""
    target, config = work.models.target, work.config
    values = work.micro_batch_tokens * BYTES[config.target.dtype]
    text = values * 3 * (target.hidden_size + target.family.mlp_width)
    features = values * target.hidden_size * (2 + len(work.models.draft.levels))
    shape = (work.micro_batch_size, work.length, work.num_visual, work.num_roots)
    draft = draft_activations(config, work.models.draft.network, *shape)
    return features + max(text, _vision(work), draft)


def _vision(work: Workload) -> float:
    """Working set of the vision tower: pixels and the intermediate results of one layer."""
    width, mlp_width, pixels = work.models.target.family.vision_sizes
    patches = work.micro_batch_tokens * work.visual_share * work.patches_per_token
    return patches * BYTES[work.config.target.dtype] * (pixels + 3 * (width + mlp_width))


def draft_activations(config: Config, draft: Any, batch: int, length: int, num_visual: int, num_roots: int) -> float:
    """Returns bytes that autograd keeps of the draft's forward pass over sequences of `length` pairs with one image each.

    A layer keeps its residual and normalized states (about seven of the hidden size), the inputs of attention before and after
    rope and its output, and the four factors of the gated MLP. A compressor shortens the sequence after features are fused; its
    learned operators keep their inputs. Drafts are unrolled from `num_roots` pairs.
    """
    size, shape = BYTES[config.train.precision], draft_layers(draft)
    hidden = shape.sizes.hidden_size
    per_layer = 7 * hidden + 4 * shape.sizes.intermediate_size + 3 * (shape.queries + shape.keys)
    copies = 2 if getattr(draft.config, "fc_norm", False) else 1  # before and after the norms of the levels
    levels, rows = copies * len(getattr(draft, "levels", ())), draft_rows(draft, length, num_visual)
    learned = sum(isinstance(part, (Conv, Resampler)) for part in draft.modules())
    inputs = (length * levels if levels else rows * 2) + num_visual * 2 * learned
    steps, roots = steps_per_anchor(config, draft), min(rows, num_roots, config.objective.anchors or rows)
    chains = 0.0 if KINDS[config.draft.kind].is_parallel else chain_bytes(shape, size, int(steps), rows, roots)
    kept = inputs * hidden + roots * steps * shape.depth * per_layer
    if roots < rows:
        kept += rows * (4 * hidden + 3 * shape.keys)  # normalized inputs, keys and values
    return batch * (size * kept + chains)


class DraftLayers(NamedTuple):
    """Configuration and number (`depth`) of a draft's layers; widths of all heads of queries, of keys, and of one head."""

    sizes: Any
    depth: int
    queries: int
    keys: int
    head_dim: int


def draft_layers(draft: Any) -> DraftLayers:
    """Returns the sizes of a draft's layers, of a head or of a model."""
    sizes = getattr(draft.config, "text_config", draft.config)
    layers = getattr(sizes, "num_hidden_layers", 1) if sizes is not draft.config else getattr(draft, "num_layers", 1)
    is_model = hasattr(sizes, "num_hidden_layers")
    kv_heads, head_dim = layer_sizes(sizes)[0] if is_model else (sizes.num_key_value_heads, sizes.head_dim)
    return DraftLayers(sizes, layers, sizes.num_attention_heads * head_dim, kv_heads * head_dim, head_dim)


def chain_bytes(shape: DraftLayers, size: int, steps: int, rows: int, roots: int) -> float:
    """Returns bytes per sequence that the attention of unrolled steps keeps beyond its inputs and its output.

    Step i multiplies every query with the i keys of its chain in float32, where the values keep their precision, and attends to
    the keys of all pairs with `EXTRA` columns more. For fewer roots than rows it has an additive mask.
    """
    chains = roots * shape.keys * steps * (steps - 1) / 2 * (MASTER_BYTES + size)
    casts = (steps - 1) * roots * shape.queries * MASTER_BYTES * (size < MASTER_BYTES)
    longer = (steps - 1) * (roots * shape.queries + 2 * rows * shape.keys) * (1 + EXTRA / shape.head_dim) * size
    mask = roots * shape.queries // shape.keys * rows * size if roots < rows else 0
    return chains + casts + longer + mask


def steps_per_anchor(config: Config, draft: Any) -> float:
    """Returns the mean predictions per position of a training step: unrolled steps, or levels of a block that are kept."""
    if not KINDS[config.draft.kind].is_parallel:
        return config.objective.steps
    assert isinstance(config.draft, SlotOptions)
    return sum(config.draft.kept_shares(draft.num_levels))


def draft_rows(draft: Any, length: int, num_visual: int) -> int:
    """Returns the length of the draft's input for a sequence of `length` pairs, after a compressor."""
    compressor = getattr(draft, "compressor", None)
    return length if compressor is None else length - num_visual + int(compressor.num_rows(num_visual))


def _objective(work: Workload) -> float:
    """Logits of one chunk on both sides; hidden states of every step with their gradients; the gradient of an own lm_head."""
    config, models = work.config, work.models
    size, hidden = BYTES[config.train.precision], models.target.hidden_size
    steps, vocabulary, tokens = work.steps, work.draft_vocab_size, work.micro_batch_tokens
    supervised = tokens * work.supervised_share
    predicted = steps * tokens * work.drafted_share
    rows = min(config.objective.chunk_tokens, predicted)
    block = min(BLOCK_LOGITS["cpu" if config.launch.device is Device.cpu else "cuda"], vocabulary * rows)
    chunk = vocabulary * rows * (1 + 1 / steps) * size + block * BLOCK_BYTES
    states = (supervised + 2 * predicted) * hidden * size
    own_head = vocabulary * hidden * (MASTER_BYTES + (size if size < MASTER_BYTES else 0))  # the sum, and its cast
    return chunk + states + models.draft.has_own_lm_head * own_head

"""Operations, memory traffic and communication of an optimizer step, for the longest examples. Formulas: docs/plan.md.

Matrix products are counted as operations, everything between them as bytes, since each operator reads and writes memory.
"""

from __future__ import annotations

import math

import torch

from sage.runtime.modes import VisionAttention
from train.config.checks import MAX_STAGE
from train.config.derived import zero_stage
from train.config.schema import Precision
from train.distill.compiled_layers import is_compiling
from train.engine.optimizers import ITERATIONS
from train.plan.memory import BYTES, MASTER_BYTES, Workload, draft_layers, draft_rows

NVLINK_BYTES_PER_S = 100e9  # received by a rank
NETWORK_BYTES_PER_S = 50e9  # received by a node: one adapter of 400 Gbit/s
BACKWARD = 2  # forward passes that a backward pass costs
ADAMW_BYTES = 3 * 2 * MASTER_BYTES + MASTER_BYTES  # of a parameter: weight and moments, read and written; the gradient
IN_CALLS = (VisionAttention.eager, VisionAttention.sdpa)  # attention of packed images with one call per image and window
SUM_BYTES = 2 * MASTER_BYTES  # of an entry of a sum of gradients, read and written


def flops_of_step(work: Workload) -> dict[str, float]:
    """Returns floating-point operations of matrix products over all ranks: of vision, text, draft, objective."""
    models, target = work.models, work.models.target
    tokens = work.config.train.global_batch_size * work.length
    own_head = models.draft.has_own_lm_head * work.draft_vocab_size * target.hidden_size  # read at supervised positions only
    attention = 2 * work.length * target.hidden_size * target.num_layers  # causal: half of the pairs, QK and AV
    rows, context_rows = _draft_rows(work)
    read = (models.draft_parameters - own_head) * rows + models.context_parameters * context_rows
    # logits of the target once for each position with a prediction; for each prediction those of the draft, the gradient back
    # through its lm_head and that of an own lm_head
    logits = _compared_share(work) + (2 + models.draft.has_own_lm_head) * work.drafted_share * work.steps
    return {
        "vision": 2 * models.vision_parameters * tokens * work.visual_share * work.patches_per_token,
        "text": (2 * models.text_parameters + attention) * tokens,
        "draft": 2 * read * tokens * (1 + BACKWARD),
        "objective": 2 * work.draft_vocab_size * target.hidden_size * tokens * logits,
    }


def bytes_of_step(work: Workload) -> dict[str, float]:
    """Returns bytes that operators between matrix products read and write over all ranks, by the same parts."""
    config, target, draft = work.config, work.models.target, work.models.draft.network
    tokens = config.train.global_batch_size * work.length
    frozen, trained = BYTES[config.target.dtype], BYTES[config.train.precision]
    text, patches = target.text_config, tokens * work.visual_share * work.patches_per_token
    heads = (text.num_attention_heads + target.num_kv_heads) * target.head_dim
    width, mlp_width, _ = target.family.vision_sizes
    compiled = compiled_parts(work)
    sizes, draft_depth, draft_heads = draft_layers(draft)
    predicted = work.steps * work.drafted_share
    passes = config.train.global_batch_size / work.micro_batch_size
    chunks = math.ceil(predicted * work.micro_batch_tokens / config.objective.chunk_tokens)
    head_sum = passes * chunks * SUM_BYTES * work.draft_vocab_size * target.hidden_size
    layers = {
        "vision": (width, mlp_width, 2 * width, frozen),
        "text": (target.hidden_size, target.family.mlp_width, heads, frozen),
        "draft": (sizes.hidden_size, sizes.intermediate_size, draft_heads, trained),
    }
    rows = {
        "vision": int(getattr(work.vision, "depth", getattr(work.vision, "num_hidden_layers", 0))) * patches,
        "text": target.num_layers * tokens,
        "draft": draft_depth * tokens * _draft_rows(work)[0] * (1 + BACKWARD),
    }
    traffic = {part: layer_bytes(*layer, part in compiled) * rows[part] for part, layer in layers.items()}
    logits = work.draft_vocab_size * tokens * (46 * _compared_share(work) + 68 * predicted)
    return traffic | {"objective": logits + work.models.draft.has_own_lm_head * head_sum}


def layer_bytes(width: int, mlp_width: int, heads: int, size: int, is_compiled: bool) -> float:
    """Returns bytes that a layer reads and writes per row between its products, for elements of `size` bytes.

    Two RMS norms, two residual sums, rope of all heads of queries and keys, and a gated MLP's activation. Compiled, each
    of them reads its operands and writes its result once. In single operators, norms are computed in float32, rope takes two
    products, a rotation and a sum, and the MLP an activation and a product.
    """
    if is_compiled:
        return size * (10 * width + 2 * heads + 3 * mlp_width)
    norms = 2 * (4 * size + 7 * 4) * width
    return norms + 2 * 3 * size * width + 10 * size * heads + 5 * size * mlp_width


def compiled_parts(work: Workload) -> set[str]:
    """Returns the parts whose layers are compiled on a GPU (`train.compile`)."""
    config, family = work.config, work.models.target.family
    if not is_compiling(config, torch.device("cuda")):
        return set()
    in_calls = family.is_packed and (config.target.attention in IN_CALLS or config.target.dtype is Precision.fp32)
    is_eager = {"vision": in_calls, "text": config.deepspeed.shard_target, "draft": zero_stage(config) == MAX_STAGE}
    return {part for part, eager in is_eager.items() if not eager}


def _draft_rows(work: Workload) -> tuple[float, float]:
    """Returns the rows per token of the draft's layers over all unrolled steps, and of those from which nothing is drafted,
    which are only fused and have keys and values.
    """
    rows = draft_rows(work.models.draft.network, work.length, work.num_visual) / work.length
    drafted = min(rows, work.drafted_share)
    if work.config.objective.anchors is not None:
        return work.steps * drafted, rows - drafted
    return rows + (work.steps - 1) * drafted, 0.0  # later steps draft from text alone


def _compared_share(work: Workload) -> float:
    """Returns the positions, per token, whose tokens some draft predicts."""
    return min(work.supervised_share, work.drafted_share * work.steps)


def transfer_s(work: Workload, size: float, group: int) -> float:
    """Returns the seconds in which each rank of a group receives what it lacks of `size` bytes, which the group holds once.

    The slower of NVLink and network.
    """
    nodes = math.ceil(group / work.ranks_per_node)
    within, between = (size * (parts - 1) / parts for parts in (group, nodes))
    return max(within / NVLINK_BYTES_PER_S, between / NETWORK_BYTES_PER_S)


def exposed_s(gather_s: float, text_s: float, layers: int) -> float:
    """Returns the part of gathering a sharded target that a pass waits for: its first layer, and what takes longer than the
    layers before. A layer is gathered while the one before it runs.

    Args:
        gather_s: of all layers.
        text_s: of running them.
    """
    return gather_s / layers + (layers - 1) / layers * max(0.0, gather_s - text_s)


def update_s(work: Workload, accumulation: int) -> float:
    """Returns the seconds of reducing the draft's gradients in float32, sending its weights, and of the optimizer; nothing
    overlaps.
    """
    config, trained = work.config, work.models.trained_parameters
    stage = zero_stage(config)
    reduced = trained * MASTER_BYTES * (accumulation if stage > 1 else 1)
    if stage == 0:
        reduced *= 2  # every rank receives all sums
    weights = trained * BYTES[config.train.precision] * (2 * accumulation if stage == MAX_STAGE else min(stage, 1))
    shares = work.ranks if stage else 1
    moved_s = transfer_s(work, reduced + weights, work.ranks) + trained * ADAMW_BYTES / shares / work.bytes_per_s
    return moved_s + muon_s(work)


def muon_s(work: Workload) -> float:
    """Returns the seconds of putting together the matrices that Muon trains, in float32, and of orthogonalizing them. An
    iteration takes two products of M x M with M x N and one of M x M with itself, M being the smaller side.
    """
    matrices, is_sharded = work.models.muon_matrices(work.config), zero_stage(work.config) > 0
    gathered = 2 * MASTER_BYTES * sum(rows * columns for rows, columns in matrices) * is_sharded  # a sum, sent to all
    flops = ITERATIONS * sum(4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3 for shape in matrices)
    return transfer_s(work, gathered, work.ranks) + flops / (work.ranks if is_sharded else 1) / work.flops_per_s

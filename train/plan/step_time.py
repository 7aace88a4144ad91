"""Operations, memory traffic and communication of an optimizer step, for the longest examples. Formulas: docs/plan.md.

Matrix products are counted as operations, everything between them as bytes, since every operator of its own reads and writes
memory. Does not own: the time that follows (train.plan.estimate).
"""

from __future__ import annotations

import math

from train.config.checks import MAX_STAGE, zero_stage
from train.plan.memory import BYTES, MASTER_BYTES, Workload, draft_layers, draft_rows

NVLINK_BYTES_PER_S = 100e9  # received by a rank
NETWORK_BYTES_PER_S = 50e9  # received by a node: one adapter of 400 Gbit/s
BACKWARD = 2  # forward passes that a backward pass costs
ADAMW_BYTES = 3 * 2 * MASTER_BYTES + MASTER_BYTES  # of a parameter: weight and moments, read and written; the gradient
SUM_BYTES = 2 * MASTER_BYTES  # of an entry of a sum of gradients, read and written


def flops_of_step(work: Workload) -> dict[str, float]:
    """Returns floating-point operations of matrix products over all ranks: of vision, text, draft, objective."""
    models, target, steps = work.models, work.models.target, work.config.objective.steps
    tokens = work.config.train.global_batch_size * work.length
    own_head = models.draft.has_own_lm_head * work.draft_vocab_size * target.hidden_size  # read at supervised positions only
    attention = 2 * work.length * target.hidden_size * target.num_layers  # causal: half of the pairs, QK and AV
    logits = 2 * work.draft_vocab_size * target.hidden_size * tokens * (1 - work.visual_share)
    return {
        "vision": 2 * models.vision_parameters * tokens * work.visual_share * work.patches_per_token,
        "text": (2 * models.text_parameters + attention) * tokens,
        "draft": 2 * (models.draft_parameters - own_head) * tokens * _draft_rows(work) * (1 + BACKWARD),
        # the target's logits once; at each step those of the draft, the gradient back through its lm_head and of an own lm_head
        "objective": logits * (1 + (2 + models.draft.has_own_lm_head) * steps),
    }


def bytes_of_step(work: Workload) -> dict[str, float]:
    """Returns bytes that operators between matrix products read and write over all ranks, by the same parts."""
    config, target, draft = work.config, work.models.target, work.models.draft.network
    tokens, steps = config.train.global_batch_size * work.length, config.objective.steps
    frozen, trained = BYTES[config.target.dtype], BYTES[config.train.precision]
    text, patches = target.text_config, tokens * work.visual_share * work.patches_per_token
    heads = (text.num_attention_heads + target.num_kv_heads) * target.head_dim
    width, mlp_width, _ = target.family.vision_sizes
    sizes, draft_depth, draft_heads = draft_layers(draft)
    logits = work.draft_vocab_size * tokens * (1 - work.visual_share)
    passes = config.train.global_batch_size / work.micro_batch_size
    chunks = math.ceil(steps * work.micro_batch_tokens * (1 - work.visual_share) / config.objective.chunk_tokens)
    head_sum = passes * chunks * SUM_BYTES * work.draft_vocab_size * target.hidden_size
    return {
        "vision": layer_bytes(width, mlp_width, 2 * width, frozen) * work.vision_layers * patches,
        "text": layer_bytes(target.hidden_size, target.family.mlp_width, heads, frozen) * target.num_layers * tokens,
        "draft": layer_bytes(sizes.hidden_size, sizes.intermediate_size, draft_heads, trained)
        * (draft_depth * tokens * _draft_rows(work) * (1 + BACKWARD)),
        "objective": logits * (46 + 68 * steps) + work.models.draft.has_own_lm_head * head_sum,
    }


def layer_bytes(width: int, mlp_width: int, heads: int, size: int) -> float:
    """Returns bytes that a layer reads and writes per row between its products, for elements of `size` bytes.

    Two RMS norms in float32, two residual sums, rope of all heads of queries and keys, and a gated MLP's activation.
    """
    norms = 2 * (4 * size + 7 * 4) * width
    return norms + 2 * 3 * size * width + 10 * size * heads + 5 * size * mlp_width


def _draft_rows(work: Workload) -> float:
    """Returns rows of the draft over all unrolled steps, per token."""
    rows = draft_rows(work.models.draft.network, work.length, work.num_visual) / work.length
    return rows + (work.config.objective.steps - 1) * min(rows, 1 - work.visual_share)  # later steps draft from text alone


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
    """Returns the seconds of reducing the draft's gradients in float32, sending its weights, and AdamW; nothing overlaps."""
    config, trained = work.config, work.models.trained_parameters
    stage = zero_stage(config)
    reduced = trained * MASTER_BYTES * (accumulation if stage > 1 else 1)
    if stage == 0:
        reduced *= 2  # every rank receives all sums
    weights = trained * BYTES[config.train.precision] * (2 * accumulation if stage == MAX_STAGE else min(stage, 1))
    shares = work.ranks if stage else 1
    return transfer_s(work, reduced + weights, work.ranks) + trained * ADAMW_BYTES / shares / work.bytes_per_s

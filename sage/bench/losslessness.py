"""Comparison of generated ids with the target's own decoding, and the target's logit gap at the first difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Returns the index of the first token that differs or is missing; None if the generations are equal."""
    pairs = enumerate(zip_longest(reference, other))
    return next((index for index, (left, right) in pairs if left != right), None)


def earliest_difference(reference: Sequence[int], others: Sequence[Sequence[int]]) -> int | None:
    """Returns the smallest `first_difference` over several generations; None if all are equal."""
    found = [index for other in others if (index := first_difference(reference, other)) is not None]
    return min(found, default=None)


def top2_gap(target: Any, inputs: Mapping[str, Tensor], prefix: Sequence[int]) -> float:
    """Returns the target's logit gap between its two best next tokens after the prompt and `prefix`.

    At a gap near the rounding error of the dtype, two correct computations may disagree; a large gap indicates a bug.
    """
    best = torch.topk(next_logits(target, inputs, prefix), 2).values
    return float(best[0] - best[1])


@torch.no_grad()
def next_logits(target: Any, inputs: Mapping[str, Tensor], prefix: Sequence[int]) -> Tensor:
    """Returns the target's logits [V] after the prompt and `prefix`, in float32, from one pass without a cache."""
    prompt = target.embed(inputs)
    extended = _extend(target, prompt, prefix) if prefix else prompt
    logits: Tensor = target.lm_head(target.features(extended).last[0, -1]).float()
    return logits


def _extend(target: Any, prompt: Any, prefix: Sequence[int]) -> Any:
    """Returns the prompt followed by `prefix`, at positions from the prompt's `next_position`."""
    ids = torch.tensor([list(prefix)], dtype=torch.long, device=prompt.input_ids.device)
    positions = prompt.next_position[:, None] + torch.arange(ids.shape[1], device=ids.device)
    if prompt.position_ids.dim() == 3:
        positions = positions.expand(prompt.position_ids.shape[0], *positions.shape)
    return replace(
        prompt,
        input_ids=torch.cat([prompt.input_ids, ids], dim=1),
        embeds=torch.cat([prompt.embeds, target.embed_tokens(ids)], dim=1),
        position_ids=torch.cat([prompt.position_ids, positions], dim=-1),
        next_position=prompt.next_position + ids.shape[1],
        attention_mask=torch.cat([prompt.attention_mask, torch.ones_like(ids)], dim=1),
        visual_mask=torch.cat([prompt.visual_mask, torch.zeros_like(ids, dtype=torch.bool)], dim=1),
    )

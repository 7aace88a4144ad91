"""Micro-batches of the tiny random targets, as the loader yields them."""

from __future__ import annotations

from typing import Any

import torch
from support.models import make_inputs
from torch import nn

import sage


def padded_batch(target: sage.Target, lengths: tuple[int, ...] = (14, 9)) -> dict[str, Any]:
    """Conversations with one image each, padded on the right; the second half of each is supervised."""
    examples = [make_inputs(target, seed, length) for seed, length in enumerate(lengths)]
    ids = [example["input_ids"][0] for example in examples]
    pixels = [key for key in target.family.pixel_keys if key in examples[0]]
    tokens = {
        "input_ids": ids,
        "attention_mask": [torch.ones_like(one) for one in ids],
        "loss_mask": [torch.arange(len(one)) >= len(one) // 2 for one in ids],
    }
    batch = {key: nn.utils.rnn.pad_sequence(values, batch_first=True) for key, values in tokens.items()}
    batch |= {key: target.family.stack(key, [example[key] for example in examples]) for key in pixels}
    return {**batch, **target.family.token_inputs(batch["input_ids"]), "ids": ["a", "b"]}

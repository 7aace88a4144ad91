"""Padding and balance of the actual data: optimizer steps divided over the ranks as the run divides them, by length alone.

Does not own: the division (data_prep.batching.loader), whose loader runs here over examples that have lengths only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from data_prep.batching.loader import StepLoader
from data_prep.dataset.mixing import permutation
from train.config.schema import Config

NUM_STEPS = 16


@dataclass(frozen=True)
class Balance:
    """The tokens of simulated steps.

    Attributes:
        mean_tokens: tokens per example.
        real_share: tokens by tokens with padding.
        efficiency: tokens by what the ranks compute while they wait for the slowest one: ranks x the padded tokens of the rank
            that has most of them, in each step, or in each micro-batch of a sharded target.
    """

    mean_tokens: float
    real_share: float
    efficiency: float


def balance_of(lengths: np.ndarray, config: Config, ranks: int) -> Balance:
    """Simulates `NUM_STEPS` steps of examples whose lengths are drawn from `lengths`, int [N]; longer ones are shortened."""
    train, limit = config.train, config.data.max_length
    drawn = np.random.default_rng(config.seed).choice(lengths, NUM_STEPS * train.global_batch_size)
    drawn = drawn if limit is None else np.minimum(drawn, limit)
    by_rank = [_padded_tokens(drawn, config, rank, ranks) for rank in range(ranks)]
    steps = [np.array(step) for step in zip(*by_rank, strict=True)]  # each [ranks, micro-batches]
    waits = [step if config.deepspeed.shard_target else step.sum(-1, keepdims=True) for step in steps]
    critical = ranks * sum(int(wait.max(0).sum()) for wait in waits)
    padded = sum(int(step.sum()) for step in steps)
    return Balance(float(drawn.mean()), float(drawn.sum() / padded), float(drawn.sum() / critical))


def _padded_tokens(lengths: np.ndarray, config: Config, rank: int, ranks: int) -> list[list[int]]:
    """Returns the tokens with padding of a rank's micro-batches, by step."""
    train = config.train
    loader = StepLoader(
        _Examples(lengths),
        _collate,
        train.global_batch_size,
        train.micro_batch_size,
        rank,
        ranks,
        config.seed,
        length_window=train.length_window,
        micro_batch_tokens=train.micro_batch_tokens,
    )
    steps = iter(loader)
    found = [[batch["attention_mask"].numel() for batch in step] for step in islice(steps, NUM_STEPS)]
    steps.close()
    return found


def _collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(example["input_ids"]) for example in examples)
    return {"attention_mask": torch.ones(len(examples), longest, dtype=torch.bool)}


class _Examples:
    """Examples that have a length and no content."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"id": str(position), "input_ids": range(int(self.lengths[position]))}

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        """Returns the order of an epoch."""
        return permutation(len(self), seed, epoch)

"""Which item comes when: shuffled, mixed by weight, the same whatever the number of ranks, and from any step on."""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def permutation(size: int, *key: int | str) -> np.ndarray:
    """A shuffle of range(size) that depends on nothing but the key."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(size, generator=generator).numpy()


class Mix:
    """The order of examples over all epochs.

    Without weights an epoch is every example once. With weights an epoch is as long, but source s gets the share
    w_s / sum(w) of it; a source that is asked for less than it holds goes on in the next epoch where it stopped, one
    that is asked for more starts over in a new order.

    Args:
        source: the source of each example, int [N].
        weights: one per source, or None.
    """

    def __init__(self, source: np.ndarray, weights: list[float] | None) -> None:
        self.total = len(source)
        self.members = [np.flatnonzero(source == s) for s in range(len(weights))] if weights else []
        self.counts = _shares(self.total, weights, self.members) if weights else []

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        """The examples of one epoch in order, int64 [N]."""
        if not self.counts:
            return permutation(self.total, seed, "epoch", epoch)
        drawn = [self._draws(s, seed, epoch) for s in range(len(self.counts))]
        return np.concatenate(drawn)[permutation(self.total, seed, "epoch", epoch)]

    def _draws(self, s: int, seed: int, epoch: int) -> np.ndarray:
        """Source s's draws number [epoch * count, (epoch + 1) * count), walking through one shuffle after another."""
        members, count = self.members[s], self.counts[s]
        numbers = np.arange(epoch * count, (epoch + 1) * count)
        rounds: list[int] = np.unique(numbers // len(members)).tolist()
        orders = {r: permutation(len(members), seed, "source", s, r) for r in rounds}
        picks = [orders[int(n) // len(members)][n % len(members)] for n in numbers]
        return members[np.array(picks, dtype=np.int64)]


def _shares(total: int, weights: list[float], members: list[np.ndarray]) -> list[int]:
    """Whole numbers of examples per source that add up to `total` (largest remainders)."""
    if empty := [s for s, found in enumerate(members) if not len(found)]:
        raise ValueError(f"data.sources: source number {empty[0]} has a weight but no usable item")
    exact = np.array(weights) / sum(weights) * total
    counts = np.floor(exact).astype(int)
    for s in np.argsort(counts - exact, kind="stable")[: total - counts.sum()]:
        counts[s] += 1
    return counts.tolist()


def turn(weights: list[float], taken: list[int]) -> int:
    """The source a weighted stream reads next: the one furthest behind its share.

    Example: weights [2, 1] read 0, 1, 0, 0, 1, 0, ...
    """
    position = sum(taken) + 1
    return int(np.argmax([w / sum(weights) * position - n for w, n in zip(weights, taken, strict=True)]))

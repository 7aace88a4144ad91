"""The order of examples: shuffled and mixed by weight, as a pure function of data, seed and epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")


def permutation(size: int, *key: int | str) -> np.ndarray:
    """Returns a permutation of range(size) that depends on the key alone, int64 [size]."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(size, generator=generator).numpy()


def sample(total: int, count: int, seed: int = 0) -> Sequence[int]:
    """Returns `count` positions out of `total` in increasing order; all of them if there are no more, or with count 0."""
    if not count or count >= total:
        return range(total)
    return sorted(permutation(total, seed, "sample")[:count].tolist())


class MixedOrder:
    """The order of examples over all epochs.

    Without weights, an epoch contains every example once. With weights, an epoch has the same length, and source s has the
    share w_s / sum(w) of it: a source with more examples than its share continues in the next epoch, one with fewer restarts
    in a new order.

    Args:
        source: the source of each example, int [N].
        weights: one per source, or None.

    Raises:
        ValueError: a source with a weight has no example.
    """

    def __init__(self, source: np.ndarray, weights: list[float] | None) -> None:
        self.total = len(source)
        self.members = [np.flatnonzero(source == s) for s in range(len(weights))] if weights else []
        self.counts = _shares(self.total, weights, self.members) if weights else []

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        """Returns the examples of one epoch in order, int64 [N]."""
        if not self.counts:
            return permutation(self.total, seed, "epoch", epoch)
        drawn = [self._draws(s, seed, epoch) for s in range(len(self.counts))]
        return np.concatenate(drawn)[permutation(self.total, seed, "epoch", epoch)]

    def _draws(self, s: int, seed: int, epoch: int) -> np.ndarray:
        """Returns draws [epoch * count, (epoch + 1) * count) of source s from its infinite sequence of permutations."""
        members, count = self.members[s], self.counts[s]
        numbers = np.arange(epoch * count, (epoch + 1) * count)
        rounds: list[int] = np.unique(numbers // len(members)).tolist()
        orders = {r: permutation(len(members), seed, "source", s, r) for r in rounds}
        picks = [orders[int(n) // len(members)][n % len(members)] for n in numbers]
        return members[np.array(picks, dtype=np.int64)]


def _shares(total: int, weights: list[float], members: list[np.ndarray]) -> list[int]:
    """Returns the number of examples per source, rounded by largest remainders so that they add up to `total`."""
    if empty := [s for s, found in enumerate(members) if not len(found)]:
        raise ValueError(f"data.sources: source number {empty[0]} has a weight but no usable item")
    exact = np.array(weights) / sum(weights) * total
    counts = np.floor(exact).astype(int)
    for s in np.argsort(counts - exact, kind="stable")[: total - counts.sum()]:
        counts[s] += 1
    return counts.tolist()


def next_source(weights: list[float], taken: list[int]) -> int:
    """Returns the source that a weighted stream reads next: the one furthest below its share.

    Example: weights [2, 1] read 0, 1, 0, 0, 1, 0, ...; `taken` is the number of items read so far, per source.
    """
    position = sum(taken) + 1
    return int(np.argmax([w / sum(weights) * position - n for w, n in zip(weights, taken, strict=True)]))


def alternate(readers: Iterable[Iterator[T]]) -> Iterator[T]:
    """Yields one item of each reader in turn, until all have ended."""
    waiting = list(readers)
    while waiting:
        for reader in list(waiting):
            item = next(reader, None)
            if item is None:
                waiting.remove(reader)
            else:
                yield item

"""The order of examples: shuffled and mixed by weight, grouped by length, divided into micro-batches.

Pure functions of data, seed and epoch: every rank computes the same result, and so does a resumed run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    """The order of examples over all epochs; `source`: that of each example, int [N].

    Without weights, an epoch contains every example once. With weights, an epoch has the same length, and source s has the
    share w_s / sum(w) of it: a source with more examples than its share continues in the next epoch, one with fewer restarts
    in a new order. ValueError for a source without examples.
    """

    def __init__(self, source: np.ndarray, weights: list[float] | None) -> None:
        self.total = len(source)
        self.members = [np.flatnonzero(source == s) for s in range(len(weights or ()))]
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
    if empty := [s for s, examples in enumerate(members) if not len(examples)]:
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


def group_by_length(order: np.ndarray, lengths: np.ndarray, first: int, step_size: int, window: int, seed: int) -> np.ndarray:
    """Reorders an epoch so that examples of similar length are in the same optimizer step.

    Within every `window` steps, the examples are sorted by length and cut into steps, which are then shuffled. Example with
    steps of two examples and a window of two steps, by length:

        drawn [5 9] [1 7]   sorted 9 7 5 1   steps [9 7] [5 1]   shuffled [5 1] [9 7]

    A window ends with the epoch, so that an epoch still contains every example once.

    Args:
        order: the examples of the epoch as drawn, int [N].
        lengths: tokens of every example of the dataset, int.
        first: the position of the epoch's first example in the sequence of all epochs.
        step_size: examples per step; steps begin at multiples of it in that sequence.
        window: number of steps that are sorted together; 1 leaves the examples of every step unchanged.
    """
    last, span = first + len(order), window * step_size
    cuts = sorted({first, last, *range(first - first % span + span, last, span)})
    parts = [order[start - first : end - first] for start, end in zip(cuts, cuts[1:], strict=False)]
    reordered = [_reorder_window(part, lengths, start, step_size, seed) for part, start in zip(parts, cuts, strict=False)]
    return np.concatenate(reordered) if reordered else order


def _reorder_window(part: np.ndarray, lengths: np.ndarray, start: int, step_size: int, seed: int) -> np.ndarray:
    """Sorts one window, longest first, and shuffles its complete steps; an incomplete step at either end stays there."""
    longest_first = part[np.argsort(-lengths[part], kind="stable")]
    head = min(-start % step_size, len(part))
    num_steps = (len(part) - head) // step_size
    tail = head + num_steps * step_size
    steps = longest_first[head:tail].reshape(num_steps, step_size)
    shuffled = steps[permutation(num_steps, seed, "window", start)].ravel()
    return np.concatenate((longest_first[:head], shuffled, longest_first[tail:]))


def largest_micro_batch(order: np.ndarray, lengths: np.ndarray, step_size: int, size: int) -> list[int]:
    """Returns the micro-batch of `size` examples with the most padded tokens of the complete steps of an epoch (`order`), each
    sorted before its division. An epoch of less than a step is repeated.
    """
    steps = np.resize(order, (max(1, len(order) // step_size), step_size))
    sorted_steps = np.take_along_axis(steps, np.argsort(-lengths[steps], axis=1, kind="stable"), axis=1)
    micro_batches = sorted_steps.reshape(-1, size)
    return [int(position) for position in micro_batches[lengths[micro_batches[:, 0]].argmax()]]


def fullest_micro_batch(lengths: np.ndarray, budget: int) -> list[int]:
    """Returns the neighbours by length that fill a budget of padded tokens best, or the longest example if it exceeds it."""
    longest_first = np.argsort(-lengths, kind="stable")
    counts = np.minimum(np.maximum(1, budget // lengths[longest_first]), len(lengths) - np.arange(len(lengths)))
    first = int((counts * lengths[longest_first]).argmax())
    return [int(position) for position in longest_first[first : first + counts[first]]]


# -- a step, divided by a budget of padded tokens ----------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Examples that form one micro-batch."""

    members: tuple[int, ...]  # places of the examples in their step
    longest: int  # tokens of the longest of them, to which the others are padded

    @property
    def padded_tokens(self) -> int:
        return len(self.members) * self.longest


def divide_step(lengths: Sequence[int], budget: int, world_size: int) -> list[list[Group]]:
    """Divides the examples of a step, over all ranks, into micro-batches [passes][ranks] of at most `budget` padded tokens (the
    number of examples times the longest), those with the most first.

    Examples are sorted by length and neighbours share a micro-batch, which reduces padding. All ranks receive the same number
    of micro-batches, because every pass is collective; within that number, the largest micro-batch is as small as possible, so
    that ranks work for similar times. An example that exceeds the budget is a micro-batch of its own. Example with two ranks:

        lengths 9 3 5 4 2 8, budget 12      micro-batches [9] [8] | [5 4] [3 2]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    longest_first = [lengths[index] for index in order]
    num_passes = -(-len(_cuts(longest_first, budget)) // world_size)
    cuts = _balanced_cuts(longest_first, budget, num_passes * world_size)
    groups = [Group(tuple(order[first:end]), longest_first[first]) for first, end in cuts]
    groups.sort(key=lambda group: (-group.padded_tokens, group.members))
    return _dealt(groups, world_size)


def _cuts(longest_first: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """Returns (first, end) of the fewest runs of neighbours with at most `capacity` padded tokens, or of one longer example."""
    cuts, first = [], 0
    while first < len(longest_first):
        end = min(len(longest_first), first + max(1, capacity // longest_first[first]))
        cuts.append((first, end))
        first = end
    return cuts


def _balanced_cuts(longest_first: Sequence[int], budget: int, count: int) -> list[tuple[int, int]]:
    """Returns exactly `count` runs of neighbours; the padded tokens of the largest are the fewest possible."""
    low, high = next((length for length in longest_first if length <= budget), budget), budget
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cuts(longest_first, middle)) <= count else (middle + 1, high)
    cuts = _cuts(longest_first, high)
    while len(cuts) < count:  # the capacity needs fewer: the largest with several examples are halved
        first, end = max(
            (cut for cut in cuts if cut[1] - cut[0] > 1), key=lambda cut: (cut[1] - cut[0]) * longest_first[cut[0]]
        )
        cuts.remove((first, end))
        middle = first + (end - first) // 2
        cuts += [(first, middle), (middle, end)]
    return cuts


def _dealt(groups: Sequence[Group], world_size: int) -> list[list[Group]]:
    """Deals the groups of each pass to the ranks, the largest to the rank with the fewest tokens so far."""
    totals = [0] * world_size
    passes = []
    for first in range(0, len(groups), world_size):
        ranks = sorted(range(world_size), key=lambda rank: (totals[rank], rank))
        dealt = dict(zip(ranks, groups[first : first + world_size], strict=True))
        for rank, group in dealt.items():
            totals[rank] += group.padded_tokens
        passes.append([dealt[rank] for rank in range(world_size)])
    return passes

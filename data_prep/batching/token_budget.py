"""Division of an optimizer step into micro-batches by a budget of padded tokens.

Owns: which examples of a step share a micro-batch, and on which rank. Pure functions: every rank computes the same division,
and so does a resumed run. Does not own: the examples of a step (data_prep.batching.buckets).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Examples that form one micro-batch.

    Attributes:
        members: places of the examples in their step.
        longest: tokens of the longest of them, to which the others are padded.
    """

    members: tuple[int, ...]
    longest: int

    @property
    def padded_tokens(self) -> int:
        return len(self.members) * self.longest


def divide_step(lengths: Sequence[int], budget: int, world_size: int) -> list[list[Group]]:
    """Divides the examples of a step into micro-batches of at most `budget` padded tokens.

    Examples are sorted by length and neighbours share a micro-batch, which reduces padding. All ranks receive the same number
    of micro-batches, because every pass is collective; within that number, the largest micro-batch is as small as possible, so
    that ranks work for similar times. An example that exceeds the budget is a micro-batch of its own. Example with two ranks:

        lengths 9 3 5 4 2 8, budget 12      micro-batches [9] [8] | [5 4] [3 2]

    Args:
        lengths: tokens of each example of the step over all ranks; as many as a multiple of `world_size`.
        budget: padded tokens of a micro-batch, the number of examples times the longest.

    Returns:
        the micro-batches [passes][ranks], those with the most padded tokens first.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    longest_first = [lengths[place] for place in order]
    num_passes = -(-len(_cuts(longest_first, budget)) // world_size)
    groups = [
        Group(tuple(order[first:end]), longest_first[first])
        for first, end in _balanced_cuts(longest_first, budget, num_passes * world_size)
    ]
    groups.sort(key=lambda group: (-group.padded_tokens, group.members))
    return _dealt(groups, world_size)


def _cuts(longest_first: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """Returns (first, end) of the fewest runs of neighbours with at most `capacity` padded tokens, or of one longer example."""
    found, first = [], 0
    while first < len(longest_first):
        end = min(len(longest_first), first + max(1, capacity // longest_first[first]))
        found.append((first, end))
        first = end
    return found


def _balanced_cuts(longest_first: Sequence[int], budget: int, count: int) -> list[tuple[int, int]]:
    """Returns exactly `count` runs of neighbours; the padded tokens of the largest are the fewest possible."""
    low, high = next((length for length in longest_first if length <= budget), budget), budget
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cuts(longest_first, middle)) <= count else (middle + 1, high)
    cuts = _cuts(longest_first, high)
    heap = [(_urgency(longest_first, first, end), first, end) for first, end in cuts]
    heapq.heapify(heap)
    while len(heap) < count:  # the capacity needs fewer: the largest with several examples are halved
        _, first, end = heapq.heappop(heap)
        middle = first + (end - first) // 2
        for half in ((first, middle), (middle, end)):
            heapq.heappush(heap, (_urgency(longest_first, *half), *half))
    return [(first, end) for _, first, end in heap]


def _urgency(longest_first: Sequence[int], first: int, end: int) -> int:
    """Returns the negated padded tokens of a run that can be halved, 0 for a single example."""
    return -(end - first) * longest_first[first] if end - first > 1 else 0


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

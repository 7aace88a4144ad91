"""`StepLoader`: the micro-batches of this rank for every optimizer step, prepared ahead of the trainer.

The order is one infinite sequence of examples, epoch after epoch, a pure function of data and seed. Step s takes the next
`global_batch_size` examples and divides them into micro-batches, so that a step contains the same examples for any number of
ranks and any division:

    step s = [a b c d]    1 rank x 4: [abcd]    1 rank x 2 x 2: [ab] [cd]    2 ranks x 2: rank 0 [ab], rank 1 [cd]

Examples of similar length share a micro-batch, which reduces padding, and the longest of a step come first. Where the lengths
are known, examples of similar length are grouped into steps (`group_by_length`) and sorted before a step is divided; where they
are unknown, each rank sorts its share of a step after building it.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from typing import Any

import numpy as np

from data_prep.chat import Example
from data_prep.dataset.dataset import is_stream
from data_prep.dataset.order import divide_step, fullest_micro_batch, group_by_length, largest_micro_batch
from data_prep.workers import from_workers
from sage.io.machine import num_cores

Batch = dict[str, Any]
Collate = Callable[[list[Example]], Batch]

NUM_BATCHES_AHEAD = 8  # micro-batches; with large images, each has tens of MB
NUM_STEPS_KEPT = 64  # divisions of steps by a budget of tokens


@dataclass(eq=False, repr=False)
class StepLoader:
    """Iterating yields, per optimizer step, the list of this rank's micro-batches, without end.

    A micro-batch is `collate`'s dict of tensors plus `ids` and `sources`, the ids of the examples and the labels of their
    sources ("" where the dataset has none). The global batch size is a multiple of micro-batch size times ranks (with a budget
    of tokens: of the ranks). ValueError for a budget where the lengths are unknown.

    Attributes:
        wait_s: seconds spent waiting for micro-batches so far.
        num_tokens, num_padded_tokens: tokens of the yielded micro-batches so far, without and with padding.
        accumulation: micro-batches per step and rank; with a budget of tokens, the most that a step can have.
    """

    dataset: Any  # `__len__`, `__getitem__(position)`, `epoch(seed, epoch) -> positions`, or a stream; maybe `source_of`
    collate: Collate  # list of examples -> dict of tensors with loss_mask [B, T]
    global_batch_size: int  # examples per step over all ranks
    micro_batch_size: int  # examples per rank and pass; not used with `micro_batch_tokens`
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    start_step: int = 0  # the first step to yield, as if the earlier ones had been taken
    num_workers: int = 0  # processes that build examples, at most one per core; 0: a thread (best for cached examples)
    length_window: int = 1  # number of steps whose examples are sorted by length together, if the lengths are known; 1: none
    stage: Callable[[Batch], Batch] | None = None  # prepares a micro-batch for the trainer, in the thread that runs ahead of it
    micro_batch_tokens: int | None = None  # padded tokens per rank and pass, in a number of passes that depends on the step

    def __post_init__(self) -> None:
        if self.micro_batch_tokens is not None:
            self.micro_batch_size = 1  # the fewest examples of a micro-batch
        self.lengths: np.ndarray | None = getattr(self.dataset, "lengths", None)
        if self.micro_batch_tokens is not None and self.lengths is None:
            raise ValueError(f"train.micro_batch_tokens: {self.micro_batch_tokens}; the lengths of these data are unknown")
        self.accumulation, rest = divmod(self.global_batch_size, self.micro_batch_size * self.world_size)
        assert self.accumulation and not rest, "the configuration is checked before"
        self.wait_s, self.num_tokens, self.num_padded_tokens = 0.0, 0, 0
        self._epoch = lru_cache(maxsize=2)(self._order)  # a step may span two epochs
        self.micro_batches_of = lru_cache(maxsize=NUM_STEPS_KEPT)(self._divide)  # read ahead by a thread, and by `__iter__`

    @property
    def steps_per_epoch(self) -> float | None:
        """Optimizer steps per epoch; None for a stream."""
        return None if is_stream(self.dataset) else len(self.dataset) / self.global_batch_size

    @property
    def over_budget(self) -> str:
        """A line about the examples that exceed `micro_batch_tokens`; empty if there is none."""
        lengths, budget = self.lengths, self.micro_batch_tokens
        if lengths is None or budget is None or not (number := int((lengths > budget).sum())):
            return ""
        return (
            f"train.micro_batch_tokens={budget}: {number} of {len(lengths)} examples are longer and form micro-batches of "
            f"their own; the longest has {lengths.max()} tokens"
        )

    def largest(self) -> Batch | None:
        """Builds the largest micro-batch, the same on every rank; None if the lengths are unknown.

        It is that of the first epoch; with a budget of tokens, the fullest that any examples can form.
        """
        if self.lengths is None:
            return None
        if self.micro_batch_tokens is not None:
            positions = fullest_micro_batch(self.lengths, self.micro_batch_tokens)[: self.accumulation]
        else:
            positions = largest_micro_batch(self._epoch(0), self.lengths, self.global_batch_size, self.micro_batch_size)
        batch: Batch = _build(self.dataset, self.collate, positions)
        return batch if self.stage is None else self.stage(batch)

    def step_positions(self, step: int) -> list[int]:
        """Returns the positions of all ranks' examples of a step, in order (not for streams)."""
        total, first = len(self.dataset), step * self.global_batch_size
        return [int(self._epoch(p // total)[p % total]) for p in range(first, first + self.global_batch_size)]

    def __iter__(self) -> Generator[list[Batch], None, None]:
        batches = self._prefetched()
        try:
            for number in count(self.start_step):
                begin = time.perf_counter()
                size = self.accumulation if self.micro_batch_tokens is None else len(self.micro_batches_of(number))
                step = [next(batches) for _ in range(size)]
                self.wait_s += time.perf_counter() - begin
                self.num_tokens += sum(int(batch["attention_mask"].sum()) for batch in step)
                self.num_padded_tokens += sum(batch["attention_mask"].numel() for batch in step)
                yield step
        finally:
            batches.close()

    def _micro_batch_keys(self) -> Iterator[list[Any]]:
        """Yields the dataset keys of this rank's micro-batches: positions, or items of a stream."""
        if is_stream(self.dataset):
            items = self.dataset.items(self.seed, self.start_step * self.global_batch_size)
            while True:
                yield from self._slices([next(items) for _ in range(self.global_batch_size)])
        for step in count(self.start_step):
            yield from self.micro_batches_of(step)

    def _divide(self, step: int) -> list[list[int]]:
        """Returns the positions of this rank's micro-batches of a step."""
        positions, lengths = self.step_positions(step), self.lengths
        if lengths is None:
            return self._slices(positions)
        if self.micro_batch_tokens is None:
            return self._slices(sorted(positions, key=lambda position: -int(lengths[position])))
        passes = divide_step(lengths[positions].tolist(), self.micro_batch_tokens, self.world_size)
        return [[positions[index] for index in groups[self.rank].members] for groups in passes]

    def _slices(self, step: list[Any]) -> list[list[Any]]:
        size = self.micro_batch_size
        return [step[first : first + size] for first in range(self.rank * size, len(step), self.world_size * size)]

    def _order(self, epoch: int) -> np.ndarray:
        drawn: np.ndarray = self.dataset.epoch(self.seed, epoch)
        if self.lengths is None or self.length_window == 1:
            return drawn
        first = epoch * len(drawn)
        return group_by_length(drawn, self.lengths, first, self.global_batch_size, self.length_window, self.seed)

    # -- building micro-batches ahead -----------------------------------------------------------------------------------

    def _prefetched(self) -> Generator[Batch, None, None]:
        """Yields micro-batches that a thread builds and stages ahead of the consumer."""
        batches = self._micro_batches()
        thread = ThreadPoolExecutor(1, "step-loader")
        try:
            ahead = deque(thread.submit(next, batches) for _ in range(2 if self.num_workers else NUM_BATCHES_AHEAD))
            while True:
                batch = ahead.popleft().result()
                ahead.append(thread.submit(next, batches))
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)

    def _micro_batches(self) -> Iterator[Batch]:
        needs_sorting = self.lengths is None and self.accumulation > 1
        build = partial(_build, self.dataset, None if needs_sorting else self.collate)
        num_workers = min(self.num_workers, num_cores())
        ahead = max(2, NUM_BATCHES_AHEAD // max(1, num_workers))
        batches: Iterator[Any] = from_workers(build, self._micro_batch_keys(), num_workers, ahead)
        if needs_sorting:
            batches = self._sorted(batches)
        yield from batches if self.stage is None else map(self.stage, batches)

    def _sorted(self, built: Iterator[list[Example]]) -> Iterator[Batch]:
        """Sorts this rank's examples of each step by length and divides them into micro-batches, longest first."""
        while share := [example for _ in range(self.accumulation) for example in next(built)]:
            share.sort(key=lambda example: -len(example["input_ids"]))
            for first in range(0, len(share), self.micro_batch_size):
                yield collate_examples(share[first : first + self.micro_batch_size], self.collate)


def collate_examples(examples: list[Example], collate: Collate) -> Batch:
    """Returns one micro-batch with its `ids` and `sources`; removes `id` and `source` from the examples."""
    ids, sources = ([example.pop(key) for example in examples] for key in ("id", "source"))
    return {**collate(examples), "ids": ids, "sources": sources}


def _build(dataset: Any, collate: Collate | None, keys: list[Any]) -> Any:
    """Returns the examples of keys, or with `collate` one micro-batch of them."""
    source_of = getattr(dataset, "source_of", lambda key: "")
    examples = [{"id": str(key), **dataset[key], "source": source_of(key)} for key in keys]
    return examples if collate is None else collate_examples(examples, collate)

"""Examples -> this rank's micro-batches of each optimizer step, ahead of the trainer.

Owns: who gets which example, batching, workers, resuming. Does not own: the order itself (data_prep.dataset.mixing).

The order is one endless row of examples, epoch after epoch, a pure function of (data, seed). Step s takes the next
`global_batch_size` of it and deals them out in micro-batches, so any split of the same step into ranks and
micro-batches holds the same examples:

    step s = [a b c d]    1 rank x 4: [abcd]    1 rank x 2 x 2: [ab] [cd]    2 ranks x 2: rank 0 [ab], rank 1 [cd]

Neighbours in length share a micro-batch, so that little of it is padding, and the longest come first, so that what does not
fit into memory shows at once. Where the data set knows its lengths, whole steps are made of like lengths (see `buckets`)
and sorted before they are dealt out; where it does not, each rank sorts its share of a step once it is made.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from data_prep.batching.buckets import grouped
from data_prep.dataset.prepare import end_with_parent, worker_context

Example = dict[str, Any]
Batch = dict[str, Any]
Collate = Callable[[list[Example]], Batch]

logger = logging.getLogger(__name__)
BATCHES_AHEAD = 8  # micro-batches; of large pictures each holds tens of MB
_POLL_S = 0.1


class StepLoader:
    """Iterating yields, per optimizer step, the list of this rank's micro-batches.

    A micro-batch is `collate`'s dict of tensors plus `ids`, the examples' names. Iteration has no end; the trainer
    stops it.

    Args:
        dataset: `__len__`, `__getitem__(number)`, `epoch(seed, epoch) -> numbers`; or a stream (data_prep.dataset.stream).
        collate: list of examples -> dict of tensors with loss_mask [B, T].
        global_batch_size: examples per step over all ranks.
        micro_batch_size: examples per rank and pass.
        start_step: the first step to yield, as if the ones before had been taken.
        num_workers: processes that make examples, at most one per core; 0: a thread (best where examples are ready-made).
        length_window: steps whose examples are sorted by length together, where lengths are known; 1: none.

    Attributes:
        wait_s: seconds the consumer has waited so far.
        tokens, slots: tokens handed out so far, without and with padding.
        accumulation: micro-batches per step and rank.

    Raises:
        ValueError: the batch sizes and ranks do not divide.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        start_step: int = 0,
        num_workers: int = 0,
        length_window: int = 1,
    ) -> None:
        if min(global_batch_size, micro_batch_size) < 1 or global_batch_size % (micro_batch_size * world_size):
            raise ValueError(
                f"train.global_batch_size: {global_batch_size}; allowed: a multiple of train.micro_batch_size "
                f"({micro_batch_size}) x ranks ({world_size})"
            )
        self.dataset, self.collate = dataset, collate
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.start_step, self.num_workers, self.length_window = start_step, num_workers, length_window
        self.lengths: np.ndarray | None = getattr(dataset, "lengths", None)
        self.accumulation = global_batch_size // (micro_batch_size * world_size)
        self.wait_s, self.tokens, self.slots = 0.0, 0, 0

    @property
    def steps_per_epoch(self) -> float | None:
        """Optimizer steps that show every example once; None for a stream."""
        return None if is_stream(self.dataset) else len(self.dataset) / self.global_batch_size

    def step_numbers(self, step: int) -> list[int]:
        """All ranks' examples of a step, in order (not for streams)."""
        total = len(self.dataset)
        first = step * self.global_batch_size
        positions = range(first, first + self.global_batch_size)
        orders = {epoch: self._epoch(epoch) for epoch in {p // total for p in positions}}
        return [int(orders[p // total][p % total]) for p in positions]

    def __iter__(self) -> Generator[list[Batch], None, None]:
        batches = self._ahead()
        try:
            while True:
                begin = time.perf_counter()
                step = [next(batches) for _ in range(self.accumulation)]
                self.wait_s += time.perf_counter() - begin
                self.tokens += sum(int(batch["attention_mask"].sum()) for batch in step)
                self.slots += sum(batch["attention_mask"].numel() for batch in step)
                yield step
        finally:
            batches.close()

    def _keys(self) -> Iterator[list[Any]]:
        """This rank's micro-batches as lists of what the dataset takes: numbers, or a stream's items."""
        size = self.micro_batch_size
        for whole in self._steps():
            for micro in range(self.accumulation):
                first = (micro * self.world_size + self.rank) * size
                yield whole[first : first + size]

    def _steps(self) -> Iterator[list[Any]]:
        if is_stream(self.dataset):
            items = self.dataset.items(self.seed, self.start_step * self.global_batch_size)
            while True:
                yield [next(items) for _ in range(self.global_batch_size)]
        step = self.start_step
        while True:
            yield self._by_length(self.step_numbers(step))
            step += 1

    def _by_length(self, numbers: list[int]) -> list[int]:
        """A step's examples, longest first, where their lengths are known."""
        lengths = self.lengths
        return numbers if lengths is None else sorted(numbers, key=lambda number: -int(lengths[number]))

    def _epoch(self, epoch: int) -> np.ndarray:
        kept = getattr(self, "_kept_epochs", {})
        if epoch not in kept:
            kept = {number: order for number, order in kept.items() if number == epoch - 1}
            kept[epoch] = self._order(epoch)
            self._kept_epochs = kept
        return kept[epoch]

    def _order(self, epoch: int) -> np.ndarray:
        drawn: np.ndarray = self.dataset.epoch(self.seed, epoch)
        if self.lengths is None or self.length_window == 1:
            return drawn
        first = epoch * len(drawn)
        return grouped(drawn, self.lengths, first, self.global_batch_size, self.length_window, self.seed)

    # -- making micro-batches, endlessly and ahead -----------------------------------------------------------------------

    def _ahead(self) -> Generator[Batch, None, None]:
        """Micro-batches from a thread that runs ahead of the consumer."""
        ready: queue.Queue[Batch | BaseException] = queue.Queue(1 if self.num_workers else BATCHES_AHEAD)
        stop = threading.Event()
        thread = threading.Thread(target=self._fill, args=(ready, stop), name="step-loader", daemon=True)
        thread.start()
        try:
            while True:
                found = ready.get()
                if isinstance(found, BaseException):
                    raise found
                yield found
        finally:
            stop.set()
            thread.join()

    def _fill(self, ready: queue.Queue[Any], stop: threading.Event) -> None:
        try:
            for batch in self._micro_batches():
                if not _put(ready, batch, stop):
                    return
        except BaseException as error:  # whatever it is belongs to the consumer, who is waiting for a batch
            _put(ready, error, stop)

    def _micro_batches(self) -> Iterator[Batch]:
        needs_sorting = self.lengths is None and self.accumulation > 1
        make = _Maker(self.dataset, None if needs_sorting else self.collate)
        made = map(_checked, self._from_workers(make)) if self.num_workers else map(make, self._keys())
        return self._sorted(made) if needs_sorting else made

    def _sorted(self, made: Iterator[list[Example]]) -> Iterator[Batch]:
        """This rank's share of each step, as made, dealt out again longest first."""
        while share := [example for _ in range(self.accumulation) for example in next(made)]:
            share.sort(key=lambda example: -len(example["input_ids"]))
            for first in range(0, len(share), self.micro_batch_size):
                yield collated(share[first : first + self.micro_batch_size], self.collate)

    def _from_workers(self, make: _Maker) -> Iterator[Any]:
        loader: DataLoader[Any] = DataLoader(
            _Made(make),
            sampler=_Keys(self._keys),
            batch_size=None,
            num_workers=min(self.num_workers, len(os.sched_getaffinity(0))),
            prefetch_factor=max(2, BATCHES_AHEAD // self.num_workers),
            multiprocessing_context=worker_context(),
            worker_init_fn=_start_worker,
        )
        return iter(loader)


def collated(examples: list[Example], collate: Collate) -> Batch:
    """One micro-batch; consumes the examples."""
    ids = [example.pop("id") for example in examples]
    return {**collate(examples), "ids": ids}


class _Maker:
    """Keys -> their examples; with `collate` -> one micro-batch of them."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset, self.collate = dataset, collate

    def __call__(self, keys: list[Any]) -> Any:
        examples = [self._named(key) for key in keys]
        return examples if self.collate is None else collated(examples, self.collate)

    def _named(self, key: Any) -> Example:
        example = dict(self.dataset[key])
        return example if "id" in example else {**example, "id": str(key)}


class _Made(torch.utils.data.Dataset[Any]):
    """A mistake in the data is handed over as it is: torch would wrap it in a RuntimeError with two tracebacks."""

    def __init__(self, make: _Maker) -> None:
        self.make = make

    def __getitem__(self, keys: list[Any]) -> Any:
        try:
            return self.make(keys)
        except ValueError as error:
            return error


def _checked(found: Any) -> Any:
    if isinstance(found, ValueError):
        raise found
    return found


class _Keys(torch.utils.data.Sampler[list[Any]]):
    def __init__(self, make: Callable[[], Iterator[list[Any]]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[list[Any]]:
        return self.make()


def _start_worker(worker: int) -> None:
    end_with_parent()
    torch.set_num_threads(1)  # as many processes as workers already


def _put(ready: queue.Queue[Any], item: Any, stop: threading.Event) -> bool:
    """Waits for room; False once the consumer has gone."""
    while not stop.is_set():
        try:
            ready.put(item, timeout=_POLL_S)
        except queue.Full:
            continue
        return True
    return False


def is_stream(dataset: Any) -> bool:
    """Whether a dataset has no length and hands out items in order."""
    return hasattr(dataset, "items")

"""Examples -> this rank's micro-batches of each optimizer step, ahead of the trainer.

Owns: who gets which example, batching, workers, resuming. Does not own: the order itself (data_prep.mixing).

The order is one endless row of examples, epoch after epoch, a pure function of (data, seed). Step s takes the next
`global_batch_size` of it and deals them out in micro-batches, so any split of the same step into ranks and
micro-batches holds the same examples:

    step s = [a b c d]    1 rank x 4: [abcd]    1 rank x 2 x 2: [ab] [cd]    2 ranks x 2: rank 0 [ab], rank 1 [cd]

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from data_prep.prepare import worker_context

Batch = dict[str, Any]
Collate = Callable[[list[dict[str, Any]]], Batch]

logger = logging.getLogger(__name__)
BATCHES_AHEAD = 8  # micro-batches; of large pictures each holds tens of MB
_POLL_S = 0.1


class StepLoader:
    """Iterating yields, per optimizer step, the list of this rank's micro-batches.

    A micro-batch is `collate`'s dict of tensors plus `ids`, the examples' names. Iteration has no end; the trainer
    stops it.

    Args:
        dataset: `__len__`, `__getitem__(number)`, `epoch(seed, epoch) -> numbers`; or a stream (data_prep.stream).
        collate: list of examples -> dict of tensors with loss_mask [B, T].
        global_batch_size: examples per step over all ranks.
        micro_batch_size: examples per rank and pass.
        start_step: the first step to yield, as if the ones before had been taken.
        num_workers: processes that make examples; 0: a thread (best where examples are ready-made).

    Attributes:
        wait_s: seconds the consumer has waited so far.
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
    ) -> None:
        if min(global_batch_size, micro_batch_size) < 1 or global_batch_size % (micro_batch_size * world_size):
            raise ValueError(
                f"train.global_batch_size: {global_batch_size}; allowed: a multiple of train.micro_batch_size "
                f"({micro_batch_size}) x ranks ({world_size})"
            )
        self.dataset, self.collate = dataset, collate
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.start_step, self.num_workers = start_step, num_workers
        self.accumulation = global_batch_size // (micro_batch_size * world_size)
        self.wait_s = 0.0

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
        batches = self._from_workers() if self.num_workers else self._from_thread()
        try:
            while True:
                begin = time.perf_counter()
                step = [next(batches) for _ in range(self.accumulation)]
                self.wait_s += time.perf_counter() - begin
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
        """A step's examples, longest first, where their lengths are known: neighbours share a micro-batch, so little of it is
        padding, and what does not fit into memory shows in the first pass. The step as a whole stays the same."""
        lengths = getattr(self.dataset, "lengths", None)
        return numbers if lengths is None else sorted(numbers, key=lambda number: -int(lengths[number]))

    def _epoch(self, epoch: int) -> np.ndarray:
        kept = getattr(self, "_kept_epochs", {})
        if epoch not in kept:
            kept = {number: order for number, order in kept.items() if number == epoch - 1}
            kept[epoch] = self.dataset.epoch(self.seed, epoch)
            self._kept_epochs = kept
        return kept[epoch]

    # -- making micro-batches, endlessly --------------------------------------------------------------------------------

    def _from_thread(self) -> Generator[Batch, None, None]:
        ready: queue.Queue[Batch | BaseException] = queue.Queue(BATCHES_AHEAD)
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
        make = _Batcher(self.dataset, self.collate)
        try:
            for keys in self._keys():
                if not _put(ready, make(keys), stop):
                    return
        except BaseException as error:  # whatever it is belongs to the consumer, who is waiting for a batch
            _put(ready, error, stop)

    def _from_workers(self) -> Generator[Batch, None, None]:
        loader: DataLoader[Any] = DataLoader(
            _Batches(_Batcher(self.dataset, self.collate)),
            sampler=_Keys(self._keys),
            batch_size=None,
            num_workers=self.num_workers,
            prefetch_factor=max(2, BATCHES_AHEAD // self.num_workers),
            multiprocessing_context=worker_context(),
            worker_init_fn=_start_worker,
        )
        yield from loader


class _Batcher:
    """Keys -> one collated micro-batch."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset, self.collate = dataset, collate

    def __call__(self, keys: list[Any]) -> Batch:
        examples = [dict(self.dataset[key]) for key in keys]
        ids = [example.pop("id", str(key)) for example, key in zip(examples, keys, strict=True)]
        return {**self.collate(examples), "ids": ids}


class _Batches(torch.utils.data.Dataset[Batch]):
    def __init__(self, make: _Batcher) -> None:
        self.make = make

    def __getitem__(self, keys: list[Any]) -> Batch:
        return self.make(keys)


class _Keys(torch.utils.data.Sampler[list[Any]]):
    def __init__(self, make: Callable[[], Iterator[list[Any]]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[list[Any]]:
        return self.make()


def _start_worker(worker: int) -> None:
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

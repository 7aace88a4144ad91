"""Datasets for `StepLoader`: `ConversationDataset` encodes on access, `StreamDataset` reads sources in order.

Reading an invalid item raises its BadItem where `data.on_bad` is `error`; else the item is skipped and listed.

What is counted over a dataset: the draft vocabulary, which is the most frequent tokens of the training answers (Ref: EAGLE-3,
arXiv 2503.01840, as released), and the time to prepare an image.

Shapes: V target vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data_prep.chat import Example, build_example, encode_example, segments
from data_prep.config import DataConfig, OnBad
from data_prep.conversation import BadItem, Conversation, check_conversation, media_parts
from data_prep.dataset.index import SKIPPED, Index, SkipLog, read_skipped, unique_rows
from data_prep.dataset.lengths import Measuring
from data_prep.dataset.order import MixedOrder, alternate, next_source, permutation
from data_prep.dataset.prepare import StoredDataset
from data_prep.sources.base import Source, Split, as_example
from sage.inputs.processing import Processor
from sage.io.files import json_digest

logger = logging.getLogger(__name__)
MAX_INVALID_IN_A_ROW = 100
NUM_CANDIDATES = 8  # an item of a stream and the replacements to try if its image is invalid
NUM_SAMPLED = 4096  # examples whose tokens are counted where they are not cached
NUM_PREPARED = 8  # examples whose preparation is timed
RawItem = Conversation | BadItem


def skip_path(config: DataConfig, index: Index) -> Path:
    return Path(config.bad_list) if config.bad_list else index.folder / SKIPPED


class ConversationDataset(Dataset[Example]):
    """Opens images and encodes examples on access, in the calling process."""

    def __init__(self, config: DataConfig, index: Index, processor: Processor, weights: list[float] | None = None) -> None:
        self.config, self.index, self.processor = config, index, processor
        self.fingerprint = index.fingerprint
        self.skipped = SkipLog(skip_path(config, index), is_strict=config.on_bad is OnBad.error)
        self.epoch = MixedOrder(index.source, weights).epoch  # seed, number of an epoch -> its positions, int64 [N]
        self._labels = list(config.sources)
        self._measuring = Measuring(config, index, processor)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, position: int) -> Example:
        """Returns the example, or the next valid one if it is invalid and `on_bad` is `skip`.

        The replacement depends on the position alone, so it is the same for any number of ranks.
        """
        positions = [(position + offset) % len(self) for offset in range(MAX_INVALID_IN_A_ROW)]
        return _first_valid(self, positions, self.conversation)

    def source_of(self, position: int) -> str:
        return self._labels[self.index.source[position]]

    def conversation(self, position: int) -> Conversation:
        """Returns the item without opening its images."""
        return self.index.conversation(position)

    def skipped_items(self) -> list[dict[str, str]]:
        """Returns the items that were skipped during preparation or, since then, by this process."""
        return unique_rows(read_skipped(self.index.folder / SKIPPED) + [item.as_row() for item in self.skipped.items])

    def full_lengths(self) -> np.ndarray:
        """Returns the lengths of all valid examples before they are shortened, int64 [N, 3] (`Lengths`)."""
        return self._full_lengths[self._full_lengths[:, 0] > 0]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens per example, int64 [N], measured once without decoding pixels."""
        return self._measuring.built(self._full_lengths)

    @cached_property
    def _full_lengths(self) -> np.ndarray:
        return self._measuring.full(self.skipped.add)


def is_stream(dataset: Any) -> bool:
    """Returns whether a dataset has no length and yields its items in order."""
    return hasattr(dataset, "items")


class StreamDataset:
    """Sources that are read in order, shuffled within blocks and mixed by weight, a pure function of sources and seed.

    Positions count raw items, invalid and held-out ones included, so that a resumed run skips in every source to the right
    position without decoding any item.
    """

    def __init__(self, config: DataConfig, streams: list[Source], processor: Processor, skip_path: Path) -> None:
        self.config, self.streams, self.processor = config, streams, processor
        self.fingerprint = json_digest([[stream.fingerprint() for stream in streams], config.shuffle_block])
        self.skipped = SkipLog(skip_path, is_strict=config.on_bad is OnBad.error)
        self.weights = config.source_weights() or [1.0] * len(streams)

    def items(self, seed: int, start: int) -> Iterator[list[Conversation]]:
        """Yields items without end, from position `start` on; each item with the replacements that follow it."""
        size = self.config.shuffle_block
        block, first = divmod(start, size)
        raw = self._mixed(block * size)
        while True:
            order = permutation(size, seed, "block", block)
            raw_items = list(islice(raw, size))
            usable = [self._usable(raw_items[index]) for index in order]
            for index in range(first, size):
                rotated = (usable[(index + offset) % size] for offset in range(size))
                item = list(islice((conversation for conversation in rotated if conversation is not None), NUM_CANDIDATES))
                if not item:
                    raise ValueError(f"data.sources: no valid item among {size} in a row; see {self.skipped.path}")
                yield item
            block, first = block + 1, 0

    def __getitem__(self, candidates: list[Conversation]) -> Example:
        """Returns the example of the first candidate, or of the next valid one if `on_bad` is `skip`."""
        return _first_valid(self, candidates, lambda conversation: conversation)

    def source_of(self, candidates: list[Conversation]) -> str:
        names = {stream.name: label for stream, label in zip(self.streams, self.config.sources, strict=False)}
        return names.get(candidates[0].source, "")

    def one_pass(self, split: Split) -> Iterator[Conversation]:
        """Yields every valid item of a split once, alternating between the sources regardless of their weights."""
        for raw in alternate(stream.iterate(0) for stream in self.streams):
            if (conversation := self._usable(raw, split)) is not None:
                try:
                    yield as_example(conversation)
                except BadItem as error:
                    self.skipped.add(error)

    def skipped_items(self) -> list[dict[str, str]]:
        """Returns the items skipped by this process."""
        return [item.as_row() for item in self.skipped.items]

    def _mixed(self, position: int) -> Iterator[RawItem]:
        """Yields the raw items of all streams, mixed by weight, from a position of the mix on."""
        taken = [0] * len(self.streams)
        for _ in range(position):
            taken[next_source(self.weights, taken)] += 1
        readers = [_endless(stream, count) for stream, count in zip(self.streams, taken, strict=True)]
        while True:
            chosen = next_source(self.weights, taken)
            taken[chosen] += 1
            yield next(readers[chosen])

    def _usable(self, item: RawItem, split: Split = Split.train) -> Conversation | None:
        if isinstance(item, BadItem):
            self.skipped.add(item)
            return None
        return item if self.config.shares.has(item, split) else None


def _endless(stream: Source, start: int) -> Iterator[RawItem]:
    """Yields a stream's raw items from number `start` on, restarting at its end; ValueError if it is empty."""
    while True:
        num_read = 0
        for item in stream.iterate(start):
            yield item
            num_read += 1
        length = start + num_read if num_read or not start else sum(1 for _ in stream.iterate(0))  # or it is in a later pass
        if not length:
            raise ValueError(f"{stream.name}: not one item in it")
        start = 0 if num_read else start % length
        logger.info("%s ended after %d items; starting over", stream.name, length)


def _first_valid(
    dataset: ConversationDataset | StreamDataset, keys: Sequence[Any], read: Callable[[Any], Conversation]
) -> Example:
    config = dataset.config
    for key in keys:
        try:
            return build_example(read(key), dataset.processor, config.max_length, config.on_long, config.num_frames)
        except BadItem as error:
            dataset.skipped.add(error)
    raise ValueError(f"{dataset.skipped.path}: {len(keys)} invalid items in a row; is data.media_root right?")


def count_tokens(dataset: Any, vocab_size: int) -> Tensor:
    """Returns the number of supervised occurrences of each token, int64 [V].

    Counts all examples if they are cached, else the complete answers of an evenly spaced sample, whose images are not opened;
    each example once, regardless of the weight of its source. The result is a function of the data alone.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for ids in _answers(dataset):
        counts += np.bincount(ids, minlength=vocab_size)
    return torch.from_numpy(counts)


def most_frequent(counts_V: Tensor, size: int, always: Iterable[int]) -> Tensor:
    """Returns the `size` most frequent ids and those of `always` in increasing order, LongTensor [size].

    The lower id comes first among equal counts. Raises ValueError if `always` has more than `size` ids.
    """
    kept = sorted(set(always))
    if len(kept) > size:
        raise ValueError(f"draft.draft_vocab_size={size}: allowed: {len(kept)} or more, for the tokens that end an answer")
    ranked = counts_V.clone()
    ranked[kept] = torch.iinfo(ranked.dtype).max
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def _answers(dataset: Any) -> Iterable[np.ndarray]:
    """Yields the supervised ids of one example at a time, int64."""
    if isinstance(dataset, StoredDataset):
        yield from map(dataset.supervised, range(len(dataset)))
        return
    if is_stream(dataset):
        conversations = (candidates[0] for candidates in islice(dataset.items(0, 0), NUM_SAMPLED))
    else:
        positions = np.linspace(0, len(dataset) - 1, min(NUM_SAMPLED, len(dataset))).round().astype(int).tolist()
        conversations = (dataset.conversation(position) for position in positions)
    for conversation in conversations:
        try:
            messages = check_conversation(conversation).messages
        except BadItem:  # skipped in training, too, or the error that ends it
            continue
        yield np.array(dataset.processor.supervised_tokens(segments(messages, dataset.processor)), dtype=np.int64)


@dataclass(frozen=True)
class Preparation:
    """What a few examples of a dataset took."""

    image_s: float  # seconds of one core per image or video, text included
    images: float  # images and videos per example

    def line(self, workers: int) -> str:
        """Returns one line: the time of an image, and how many images this number of workers prepares per second."""
        by = f"{workers} workers prepare" if workers else "the thread beside training prepares"
        rate = max(1, workers) / self.image_s
        return f"preparing an image takes {1e3 * self.image_s:.0f} ms of a core; {by} {rate:.0f} images/s (data.num_workers)"


def measure_preparation(dataset: Any) -> Preparation | None:
    """Prepares a few examples, evenly spaced; None if none of them has an image, for cached examples, and for a stream."""
    if not isinstance(dataset, ConversationDataset):
        return None
    positions = range(0, len(dataset), max(1, len(dataset) // NUM_PREPARED))[:NUM_PREPARED]
    timed = []  # images and videos of each example, and its seconds of a core
    for position in (0, *positions):
        started_s = time.process_time()
        try:
            conversation = dataset.conversation(position)
            encode_example(conversation, dataset.processor, dataset.config.num_frames)
            timed.append((sum(1 for _ in media_parts(conversation.messages)), time.process_time() - started_s))
        except BadItem:  # training reports it
            timed.append((0, 0.0))
    images = sum(count for count, _ in timed[1:])  # the first call of all imports modules
    return Preparation(sum(cpu_s for count, cpu_s in timed[1:] if count) / images, images / len(positions)) if images else None

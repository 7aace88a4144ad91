"""`StreamDataset`: examples of sources that are read in order, shuffled within blocks and mixed by weight.

The order is a pure function of sources and seed. Positions count raw items, invalid and held-out ones included, so that a
resumed run skips in every source to the right position without decoding any item.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from data_prep.chat import Example, build_example
from data_prep.config import DataConfig, OnBad
from data_prep.conversation import BadItem, Conversation
from data_prep.dataset.mixing import alternate, next_source, permutation
from data_prep.dataset.skip_log import SkipLog
from data_prep.sources.base import Stream, as_example
from data_prep.splits import Split
from sage.inputs.processing import Processor
from sage.io.files import json_digest

logger = logging.getLogger(__name__)
NUM_CANDIDATES = 8  # an item and the replacements to try if its image is invalid
Candidates = list[Conversation]
RawItem = Conversation | BadItem


def is_stream(dataset: Any) -> bool:
    """Returns whether a dataset has no length and yields its items in order."""
    return hasattr(dataset, "items")


class StreamDataset:
    """A dataset without length, for `StepLoader`.

    Args:
        streams: the sources of a split, in the order of the config.
        skip_path: the list of skipped items.

    Attributes:
        fingerprint: content hash of the settings, for provenance.
    """

    def __init__(self, config: DataConfig, streams: list[Stream], processor: Processor, skip_path: Path) -> None:
        self.config, self.streams, self.processor = config, streams, processor
        self.fingerprint = json_digest([[stream.fingerprint() for stream in streams], config.shuffle_block])
        self.skipped = SkipLog(skip_path, is_strict=config.on_bad is OnBad.error)
        self.weights = config.source_weights() or [1.0] * len(streams)

    def items(self, seed: int, start: int) -> Iterator[Candidates]:
        """Yields items without end, from position `start` on; each item with the replacements that follow it."""
        size = self.config.shuffle_block
        block, first = divmod(start, size)
        raw = self._mixed(block * size)
        while True:
            order = permutation(size, seed, "block", block)
            found = list(islice(raw, size))
            usable = [self._usable(found[place]) for place in order]
            for place in range(first, size):
                rotated = (usable[(place + offset) % size] for offset in range(size))
                item = list(islice((conversation for conversation in rotated if conversation is not None), NUM_CANDIDATES))
                if not item:
                    raise ValueError(f"data.sources: no valid item among {size} in a row; see {self.skipped.path}")
                yield item
            block, first = block + 1, 0

    def __getitem__(self, candidates: Candidates) -> Example:
        """Returns the example of the first candidate, or of the next valid one if `on_bad` is `skip`."""
        config = self.config
        for conversation in candidates:
            try:
                return build_example(conversation, self.processor, config.max_length, config.on_long, config.num_frames)
            except BadItem as error:
                self.skipped.add(error)
        raise ValueError(f"{self.skipped.path}: {len(candidates)} invalid items in a row; is data.media_root right?")

    def source_of(self, candidates: Candidates) -> str:
        """Returns the label of the source of an item."""
        names = {stream.name: label for stream, label in zip(self.streams, self.config.sources, strict=False)}
        return names.get(candidates[0].source, "")

    def one_pass(self, split: Split) -> Iterator[Conversation]:
        """Yields every valid item of a split once, alternating between the sources regardless of their weights."""
        for raw in alternate(stream.iterate(0) for stream in self.streams):
            if (found := self._usable(raw, split)) is not None:
                try:
                    yield as_example(found)
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


def _endless(stream: Stream, start: int) -> Iterator[RawItem]:
    """Yields a stream's raw items from number `start` on, restarting at its end; ValueError if it is empty."""
    while True:
        num_read = 0
        for item in stream.iterate(start):
            yield item
            num_read += 1
        if num_read or not start:
            length = start + num_read
            logger.info("%s ended after %d items; starting over", stream.name, length)
            start = 0
        else:  # `start` is in a later pass
            length = sum(1 for _ in stream.iterate(0))
            start %= max(1, length)
        if not length:
            raise ValueError(f"{stream.name}: not one item in it")

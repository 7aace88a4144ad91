"""Examples from sources that are read on the fly: in order, shuffled within blocks, mixed by weight.

Owns: which item comes at which position, starting over when a source ends, replacing broken items. The order is a pure
function of (sources, seed). Positions count raw items, broken and held-out ones included, so a run that resumes skips
each source to the right place without decoding anything.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from data_prep.chat import Example, build_example
from data_prep.config import DataConfig, OnBad, Split
from data_prep.conversation import BadItem, Conversation
from data_prep.dataset.mixing import permutation, turn
from data_prep.dataset.prepare import content_hash
from data_prep.dataset.skip_log import SkipList
from data_prep.sources.base import Stream, as_example, group, in_split
from sage.inputs.processing import Processor

logger = logging.getLogger(__name__)
SPARE = 8  # items handed along with each one, to take its place should its picture be broken
Item = list[Conversation]
Raw = Conversation | BadItem


class StreamDataset:
    """What `StepLoader` takes where the data has no length.

    Args:
        streams: the sources of a split, in the order of the config.
        skip_path: file that lists what was left out.

    Attributes:
        fingerprint: content hash of the settings, for provenance.
    """

    def __init__(self, config: DataConfig, streams: list[Stream], processor: Processor, skip_path: Path) -> None:
        self.config, self.streams, self.processor = config, streams, processor
        self.fingerprint = content_hash([stream.fingerprint() for stream in streams], config.shuffle_block)
        self.skipped = SkipList(skip_path, strict=config.on_bad is OnBad.error)
        weights = [source.weight for source in config.sources.values() if source.weight is not None]
        self.weights = weights or [1.0] * len(streams)

    def items(self, seed: int, start: int) -> Iterator[Item]:
        """Endless: each item with a few spare ones behind it, from position `start` on.

        Raises:
            BadItem: a broken item, where broken items are errors.
        """
        size = self.config.shuffle_block
        block = start // size
        raw = self._mixed(block * size)
        first = start % size
        while True:
            order = permutation(size, seed, "block", block)
            found = list(islice(raw, size))
            usable = [self._usable(found[place]) for place in order]
            for place in range(first, size):
                rotated = (usable[(place + offset) % size] for offset in range(size))
                item = list(islice((conversation for conversation in rotated if conversation is not None), SPARE))
                if not item:
                    raise ValueError(f"data.sources: no usable item among {size} in a row; see {self.skipped.path}")
                yield item
            block, first = block + 1, 0

    def __getitem__(self, item: Item) -> Example:
        """The example, or a spare one where its picture is broken and `on_bad` is `skip`.

        Raises:
            BadItem: the broken item, where broken items are errors.
        """
        for conversation in item:
            try:
                return self.build(conversation)
            except BadItem as error:
                self.skipped.add(error)
        raise ValueError(f"{self.skipped.path}: {len(item)} broken items in a row; is data.media_root right?")

    def build(self, conversation: Conversation) -> Example:
        """A conversation's example, under the settings of this data set.

        Raises:
            BadItem: it is broken or too long.
        """
        config = self.config
        return build_example(conversation, self.processor, config.max_length, config.on_long, config.num_frames)

    def one_pass(self, split: Split) -> Iterator[Conversation]:
        """Every usable item of a split once, checked, in order; the sources take turns whatever their weights.

        Raises:
            BadItem: a broken item, where broken items are errors.
        """
        readers = [stream.iterate(0) for stream in self.streams]
        while readers:
            for reader in list(readers):
                raw = next(reader, None)
                if raw is None:
                    readers.remove(reader)
                elif (found := self._usable(raw, split)) is not None:
                    yield from self._checked(found)

    def _checked(self, conversation: Conversation) -> list[Conversation]:
        try:
            return [as_example(conversation)]
        except BadItem as error:
            self.skipped.add(error)
            return []

    def skipped_items(self) -> list[dict[str, str]]:
        """What this process has left out so far."""
        return [item.row() for item in self.skipped.items]

    def _mixed(self, position: int) -> Iterator[Raw]:
        """Raw items of all streams, each as often as its weight says, from a position of the mix on."""
        taken = [0] * len(self.streams)
        for _ in range(position):
            taken[turn(self.weights, taken)] += 1
        readers = [_endless(stream, count) for stream, count in zip(self.streams, taken, strict=True)]
        while True:
            chosen = turn(self.weights, taken)
            taken[chosen] += 1
            yield next(readers[chosen])

    def _usable(self, found: Raw, split: Split = Split.train) -> Conversation | None:
        if isinstance(found, BadItem):
            self.skipped.add(found)
            return None
        holdout = 0.0 if self.config.validation else self.config.holdout
        return found if in_split(group(found), split, holdout) else None


def _endless(stream: Stream, start: int) -> Iterator[Raw]:
    """A stream's raw items from number `start` on, over and over.

    Raises:
        ValueError: the stream is empty.
    """
    while True:
        seen = 0
        for item in stream.iterate(start):
            yield item
            seen += 1
        if seen or not start:
            length = start + seen
            logger.info("%s ended after %d items; starting over", stream.name, length)
            start = 0
        else:  # `start` lies in a later pass
            length = sum(1 for _ in stream.iterate(0))
            start %= max(1, length)
        if not length:
            raise ValueError(f"{stream.name}: not one item in it")

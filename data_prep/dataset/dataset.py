"""Examples by number, whatever they are made from.

Owns: turning a number into an example, replacing one that turns out broken. Does not own: order (data_prep.dataset.mixing),
batches and workers (data_prep.batching.loader).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from data_prep.chat import Example, build_example
from data_prep.config import DataConfig, OnBad
from data_prep.conversation import BadItem, Conversation
from data_prep.dataset.example_store import ExampleStore
from data_prep.dataset.mixing import Mix
from data_prep.dataset.prepare import SKIPPED, Index
from data_prep.dataset.skip_log import SkipList, read_skipped
from data_prep.sources.base import Source
from sage.inputs.processing import Processor

MAX_BAD_IN_A_ROW = 100


def skip_path(config: DataConfig, index: Index) -> Path:
    """The file that lists what was left out."""
    return Path(config.bad_list) if config.bad_list else index.folder / SKIPPED


class ConversationDataset(Dataset[Example]):
    """Opens pictures and encodes when asked, in whichever process asks.

    Attributes:
        fingerprint: content hash of the items, for provenance.
    """

    def __init__(
        self,
        config: DataConfig,
        sources: list[Source],
        index: Index,
        processor: Processor,
        weights: list[float] | None = None,
    ) -> None:
        self.config, self.sources, self.index, self.processor = config, sources, index, processor
        self.fingerprint = index.fingerprint
        self.skipped = SkipList(skip_path(config, index), strict=config.on_bad is OnBad.error)
        self.mix = Mix(index.source, weights)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, position: int) -> Example:
        """The example, or the next good one where its picture is broken and `on_bad` is `skip`.

        The replacement depends on the position alone, so every rank layout sees the same examples.

        Raises:
            BadItem: the broken item, where broken items are errors.
        """
        for offset in range(MAX_BAD_IN_A_ROW):
            try:
                return self.example((position + offset) % len(self))
            except BadItem as error:
                self.skipped.add(error)
        raise ValueError(f"{self.skipped.path}: {MAX_BAD_IN_A_ROW} broken items in a row; is data.media_root right?")

    def conversation(self, position: int) -> Conversation:
        """The item itself, pictures unopened."""
        return self.sources[self.index.source[position]].conversation(int(self.index.row[position]))

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        """The order of one epoch, int64 [N]."""
        return self.mix.epoch(seed, epoch)

    def skipped_items(self) -> list[dict[str, str]]:
        """What was left out when the data was prepared, and by this process since."""
        rows = read_skipped(self.index.folder / SKIPPED) + [item.row() for item in self.skipped.items]
        return list({(row["source"], row["index"]): row for row in rows}.values())

    def example(self, position: int) -> Example:
        """The very example, not its replacement.

        Raises:
            BadItem: it is broken or too long.
        """
        return self.build(self.conversation(position))

    def build(self, conversation: Conversation) -> Example:
        """A conversation's example, under the settings of this data set.

        Raises:
            BadItem: it is broken or too long.
        """
        config = self.config
        return build_example(conversation, self.processor, config.max_length, config.on_long, config.num_frames)


class StoredDataset(Dataset[Example]):
    """Ready-made examples from the cache folder.

    Attributes:
        lengths: tokens per example, int64 [N].
    """

    def __init__(self, store: ExampleStore, weights: list[float] | None, fingerprint: str) -> None:
        self.store, self.fingerprint = store, fingerprint
        self.lengths = store.lengths()
        self.mix = Mix(store.sources, weights)

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, position: int) -> Example:
        return self.store[position]

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        """The order of one epoch, int64 [N]."""
        return self.mix.epoch(seed, epoch)


def weights_of(config: DataConfig) -> list[float] | None:
    """One weight per training source, or None where the sources have none."""
    weights = [source.weight for source in config.sources.values() if source.weight is not None]
    return weights or None

"""Map-style datasets: `ConversationDataset` encodes on access, `StoredDataset` reads cached examples.

Owns: position -> example, and the replacement of an invalid item. Does not own: the order (data_prep.dataset.mixing), batches
and worker processes (data_prep.batching.loader).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from data_prep.chat import Example, build_example
from data_prep.config import DataConfig, OnBad
from data_prep.conversation import BadItem, Conversation
from data_prep.dataset.example_store import ExampleStore
from data_prep.dataset.mixing import MixedOrder
from data_prep.dataset.prepare import Index
from data_prep.dataset.skip_log import SKIPPED, SkipLog, read_skipped, unique_rows
from data_prep.sources.base import Source
from sage.inputs.processing import Processor

MAX_INVALID_IN_A_ROW = 100


def skip_path(config: DataConfig, index: Index) -> Path:
    """Returns the path of the list of skipped items."""
    return Path(config.bad_list) if config.bad_list else index.folder / SKIPPED


class ConversationDataset(Dataset[Example]):
    """Opens images and encodes examples on access, in the calling process.

    Attributes:
        fingerprint: content hash of the items, for provenance.
    """

    def __init__(
        self, config: DataConfig, sources: list[Source], index: Index, processor: Processor, weights: list[float] | None = None
    ) -> None:
        self.config, self.sources, self.index, self.processor = config, sources, index, processor
        self.fingerprint = index.fingerprint
        self.skipped = SkipLog(skip_path(config, index), is_strict=config.on_bad is OnBad.error)
        self.order = MixedOrder(index.source, weights)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, position: int) -> Example:
        """Returns the example, or the next valid one if it is invalid and `on_bad` is `skip`.

        The replacement depends on the position alone, so it is the same for any number of ranks.

        Raises:
            BadItem: the item is invalid and `on_bad` is `error`.
        """
        for offset in range(MAX_INVALID_IN_A_ROW):
            try:
                return self.example((position + offset) % len(self))
            except BadItem as error:
                self.skipped.add(error)
        raise ValueError(f"{self.skipped.path}: {MAX_INVALID_IN_A_ROW} invalid items in a row; is data.media_root right?")

    def conversation(self, position: int) -> Conversation:
        """Returns the item, its images unopened."""
        return self.sources[self.index.source[position]].conversation(int(self.index.row[position]))

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        """Returns the positions of one epoch in order, int64 [N]."""
        return self.order.epoch(seed, epoch)

    def skipped_items(self) -> list[dict[str, str]]:
        """Returns the items skipped during preparation, and by this process since."""
        return unique_rows(read_skipped(self.index.folder / SKIPPED) + [item.as_row() for item in self.skipped.items])

    def example(self, position: int) -> Example:
        """Returns the example at a position, without replacement; raises BadItem if the item is invalid or too long."""
        return self.build(self.conversation(position))

    def build(self, conversation: Conversation) -> Example:
        """Encodes a conversation with the settings of this dataset; raises BadItem if it is invalid or too long."""
        config = self.config
        return build_example(conversation, self.processor, config.max_length, config.on_long, config.num_frames)


class StoredDataset(Dataset[Example]):
    """Cached examples.

    Attributes:
        lengths: tokens per example, int64 [N].
    """

    def __init__(self, store: ExampleStore, weights: list[float] | None, fingerprint: str) -> None:
        self.store, self.fingerprint = store, fingerprint
        self.lengths = store.lengths()
        self.order = MixedOrder(store.sources, weights)

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, position: int) -> Example:
        return self.store[position]

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        """Returns the positions of one epoch in order, int64 [N]."""
        return self.order.epoch(seed, epoch)

"""Map-style datasets: `ConversationDataset` encodes on access, `StoredDataset` reads cached examples; and the draft vocabulary,
the most frequent tokens of the training answers.

Ref. of the vocabulary: EAGLE-3, arXiv 2503.01840, as released.

Shapes: V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data_prep.chat import Example, build_example, segments
from data_prep.config import DataConfig, OnBad
from data_prep.conversation import BadItem, Conversation, check_conversation
from data_prep.dataset.example_store import ExampleStore
from data_prep.dataset.index import Index
from data_prep.dataset.measure import Measuring, built_lengths, full_lengths
from data_prep.dataset.mixing import MixedOrder
from data_prep.dataset.prepare import LENGTHS
from data_prep.dataset.skip_log import SKIPPED, SkipLog, read_skipped, unique_rows
from data_prep.dataset.stream import is_stream
from sage.inputs.processing import Processor

MAX_INVALID_IN_A_ROW = 100
NUM_SAMPLED = 4096  # examples to count where they are not cached


def skip_path(config: DataConfig, index: Index) -> Path:
    """Returns the path of the list of skipped items."""
    return Path(config.bad_list) if config.bad_list else index.folder / SKIPPED


class ConversationDataset(Dataset[Example]):
    """Opens images and encodes examples on access, in the calling process.

    Attributes:
        fingerprint: content hash of the items, for provenance.
        epoch: seed, number of an epoch -> its positions in order, int64 [N].
    """

    def __init__(self, config: DataConfig, index: Index, processor: Processor, weights: list[float] | None = None) -> None:
        self.config, self.index, self.processor = config, index, processor
        self.fingerprint = index.fingerprint
        self.skipped = SkipLog(skip_path(config, index), is_strict=config.on_bad is OnBad.error)
        self.epoch = MixedOrder(index.source, weights).epoch
        self._labels = list(config.sources)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, position: int) -> Example:
        """Returns the example, or the next valid one if it is invalid and `on_bad` is `skip`.

        The replacement depends on the position alone, so it is the same for any number of ranks.
        """
        for offset in range(MAX_INVALID_IN_A_ROW):
            try:
                return self._example((position + offset) % len(self))
            except BadItem as error:
                self.skipped.add(error)
        raise ValueError(f"{self.skipped.path}: {MAX_INVALID_IN_A_ROW} invalid items in a row; is data.media_root right?")

    def source_of(self, position: int) -> str:
        """Returns the label of the source of an item of the training split."""
        return self._labels[self.index.source[position]]

    def conversation(self, position: int) -> Conversation:
        """Returns the item without opening its images."""
        return self.index.conversation(position)

    def skipped_items(self) -> list[dict[str, str]]:
        """Returns the items that were skipped during preparation or, since then, by this process."""
        return unique_rows(read_skipped(self.index.folder / SKIPPED) + [item.as_row() for item in self.skipped.items])

    def full_lengths(self) -> np.ndarray:
        """Returns the lengths of all valid examples before they are shortened, int64 [N, 3] (`Lengths`)."""
        found = self._full_lengths
        return found[found[:, 0] > 0]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens per example, int64 [N], measured once without decoding pixels."""
        return built_lengths(self._measuring, self._full_lengths)

    @cached_property
    def _full_lengths(self) -> np.ndarray:
        return full_lengths(self._measuring, self.skipped.add)

    @property
    def _measuring(self) -> Measuring:
        return Measuring(self.config, self.index, self.processor)

    def _example(self, position: int) -> Example:
        config = self.config
        return build_example(self.conversation(position), self.processor, config.max_length, config.on_long, config.num_frames)


class StoredDataset(Dataset[Example]):
    """Cached examples.

    Attributes:
        lengths: tokens per example, int64 [N].
    """

    def __init__(self, store: ExampleStore, weights: list[float] | None, fingerprint: str, labels: Sequence[str] = ()) -> None:
        self.store, self.fingerprint, self._labels = store, fingerprint, labels
        self.lengths = store.lengths
        self.epoch = MixedOrder(store.sources, weights).epoch

    def __len__(self) -> int:
        return len(self.store)

    def full_lengths(self) -> np.ndarray:
        """Returns the lengths of all examples before they are shortened, dropped ones included, int64 [N, 3] (`Lengths`)."""
        return np.load(self.store.folder.parent / LENGTHS)

    def source_of(self, position: int) -> str:
        """Returns the label of the source of an item of the training split; "" without labels."""
        number = int(self.store.sources[position])
        return self._labels[number] if number < len(self._labels) else ""

    def __getitem__(self, position: int) -> Example:
        return self.store[position]


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
        for input_ids, loss_mask in map(dataset.store.tokens, range(len(dataset))):
            yield input_ids[loss_mask.astype(bool)]
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

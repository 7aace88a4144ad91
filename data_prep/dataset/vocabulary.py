"""The draft vocabulary: the most frequent tokens of the training answers.

Ref: EAGLE-3, arXiv 2503.01840, as released.

Shapes: V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.dataset.dataset import StoredDataset
from data_prep.dataset.stream import is_stream

NUM_SAMPLED = 4096  # examples to count where they are not cached


def count_tokens(dataset: Any, vocab_size: int) -> Tensor:
    """Returns the number of supervised occurrences of each token, int64 [V].

    Counts all examples if they are cached, else an evenly spaced sample; each example once, regardless of the weight of its
    source. The result is a function of the data alone.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for input_ids, loss_mask in _answers(dataset):
        counts += np.bincount(input_ids[loss_mask.astype(bool)], minlength=vocab_size)
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


def _answers(dataset: Any) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Yields (input_ids, loss_mask) of the cached examples at once, or of one example at a time."""
    if isinstance(dataset, StoredDataset):
        yield dataset.store.column("input_ids"), dataset.store.column("loss_mask")
        return
    if is_stream(dataset):
        keys: Iterable[Any] = islice(dataset.items(0, 0), NUM_SAMPLED)
    else:
        keys = np.linspace(0, len(dataset) - 1, min(NUM_SAMPLED, len(dataset))).round().astype(int).tolist()
    for key in keys:
        example = dataset[key]
        yield example["input_ids"].numpy(), example["loss_mask"].numpy()

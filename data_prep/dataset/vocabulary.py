"""Which words a draft with a reduced vocabulary should know: those the answers it is trained on are made of.

Ref: EAGLE-3, arXiv 2503.01840, as released (the most frequent tokens of the training answers).

Shapes: V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.batching.loader import is_stream
from data_prep.dataset.dataset import StoredDataset

SAMPLE = 4096  # examples that are counted where they would have to be made first


def count_tokens(dataset: Any, vocab_size: int) -> Tensor:
    """How often each token is supervised, int64 [V]: in all examples where they are ready-made, else in a spread sample.

    Every example counts once, whatever its source's weight. The result is a function of the data alone.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for input_ids, loss_mask in _answers(dataset):
        counts += np.bincount(input_ids[loss_mask.astype(bool)], minlength=vocab_size)
    return torch.from_numpy(counts)


def most_frequent(counts_V: Tensor, size: int, always: Iterable[int]) -> Tensor:
    """The `size` most frequent ids in increasing order, LongTensor; of equally frequent ones the lower.

    Args:
        always: ids that are among them whatever their count.

    Raises:
        ValueError: not even these fit.
    """
    kept = sorted(set(always))
    if len(kept) > size:
        raise ValueError(f"draft.draft_vocab_size={size}: allowed: {len(kept)} or more, for the tokens that end an answer")
    ranked = counts_V.clone()
    ranked[kept] = torch.iinfo(ranked.dtype).max
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def _answers(dataset: Any) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """(input_ids, loss_mask), as much of the data at a time as lies ready."""
    if isinstance(dataset, StoredDataset):
        yield dataset.store.column("input_ids"), dataset.store.column("loss_mask")
        return
    if is_stream(dataset):
        keys: Iterable[Any] = islice(dataset.items(0, 0), SAMPLE)
    else:
        keys = np.linspace(0, len(dataset) - 1, min(SAMPLE, len(dataset))).round().astype(int).tolist()
    for key in keys:
        example = dataset[key]
        yield example["input_ids"].numpy(), example["loss_mask"].numpy()

"""Grouping of examples of similar length, to reduce padding and to balance the ranks.

Pure functions: every rank computes the same order, and so does a resumed run.
"""

from __future__ import annotations

import numpy as np

from data_prep.dataset.mixing import permutation


def group_by_length(order: np.ndarray, lengths: np.ndarray, first: int, step_size: int, window: int, seed: int) -> np.ndarray:
    """Reorders an epoch so that examples of similar length are in the same optimizer step.

    Within every `window` steps, the examples are sorted by length and cut into steps, which are then shuffled. Example with
    steps of two examples and a window of two steps, by length:

        drawn [5 9] [1 7]   sorted 9 7 5 1   steps [9 7] [5 1]   shuffled [5 1] [9 7]

    Args:
        order: the examples of the epoch as drawn, int [N].
        lengths: tokens of every example of the dataset, int.
        first: the position of the epoch's first example in the sequence of all epochs.
        step_size: examples per step; steps begin at multiples of it in that sequence.
        window: number of steps that are sorted together; 1 leaves the examples of every step unchanged.
        seed: of the shuffle.

    Returns:
        The same examples, int [N]. A window ends with the epoch, so that an epoch still contains every example once.
    """
    last, span = first + len(order), window * step_size
    cuts = sorted({first, last, *range(first - first % span + span, last, span)})
    parts = [order[start - first : end - first] for start, end in zip(cuts, cuts[1:], strict=False)]
    reordered = [_reorder_window(part, lengths, start, step_size, seed) for part, start in zip(parts, cuts, strict=False)]
    return np.concatenate(reordered) if reordered else order


def _reorder_window(part: np.ndarray, lengths: np.ndarray, start: int, step_size: int, seed: int) -> np.ndarray:
    """Sorts one window, longest first, and shuffles its complete steps; an incomplete step at either end stays there."""
    longest_first = part[np.argsort(-lengths[part], kind="stable")]
    head = min(-start % step_size, len(part))
    num_steps = (len(part) - head) // step_size
    tail = head + num_steps * step_size
    steps = longest_first[head:tail].reshape(num_steps, step_size)
    shuffled = steps[permutation(num_steps, seed, "window", start)].ravel()
    return np.concatenate((longest_first[:head], shuffled, longest_first[tail:]))

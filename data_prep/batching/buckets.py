"""Like lengths beside each other, so that little of a batch is padding and no rank waits long for another.

Pure functions of their arguments: every rank computes the same order, and so does a run that resumes.
"""

from __future__ import annotations

import numpy as np

from data_prep.dataset.mixing import permutation


def grouped(order: np.ndarray, lengths: np.ndarray, first: int, step_size: int, window: int, seed: int) -> np.ndarray:
    """An epoch's order with examples of like length in the same optimizer step.

    Within every `window` steps the examples are sorted by length and cut into steps, which are then shuffled. Example, steps of
    two and a window of two, by length:

        drawn [5 9] [1 7]   sorted 9 7 5 1   steps [9 7] [5 1]   shuffled [5 1] [9 7]

    Args:
        order: the examples of the epoch as drawn, int [N].
        lengths: tokens of every example of the data set.
        first: the position of the epoch's first example in the endless row of all epochs.
        step_size: examples per step; steps begin at multiples of it in that row.
        window: steps that are sorted together; 1 changes no step.
        seed: of the shuffle.

    Returns:
        The same examples, int [N]. A window ends with the epoch, so that an epoch still shows everything once.
    """
    last, span = first + len(order), window * step_size
    cuts = sorted({first, last, *range(first - first % span + span, last, span)})
    parts = [order[start - first : end - first] for start, end in zip(cuts, cuts[1:], strict=False)]
    done = [_window(part, lengths, start, step_size, seed) for part, start in zip(parts, cuts, strict=False)]
    return np.concatenate(done) if done else order


def _window(part: np.ndarray, lengths: np.ndarray, start: int, step_size: int, seed: int) -> np.ndarray:
    """One window, longest first but for its whole steps, which are shuffled; a part of a step at either end stays there."""
    longest_first = part[np.argsort(-lengths[part], kind="stable")]
    head = min(-start % step_size, len(part))
    number = (len(part) - head) // step_size
    steps = longest_first[head : head + number * step_size].reshape(number, step_size)
    shuffled = steps[permutation(number, seed, "window", start)].ravel()
    return np.concatenate((longest_first[:head], shuffled, longest_first[head + number * step_size :]))

"""Padding and waiting of ranks for a division of steps into micro-batches, computed for lengths of image and video chats.

The work of a pass is its padded tokens. All ranks take a pass at the same time, and the next begins when the slowest has
finished, so that a step takes the sum of the largest micro-batches of its passes: its critical path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from data_prep.batching.buckets import group_by_length
from data_prep.batching.token_budget import divide_step
from data_prep.dataset.mixing import permutation
from sage.io.tables import text_table
from train.config.schema import TrainConfig

RANKS = (8, 32, 64)
LONGEST = {"image": 4096, "video": 16384}  # tokens; longer examples are shortened to it
Passes = list[list[int]]  # padded tokens [passes][ranks] of a step


@dataclass(frozen=True)
class Division:
    """How steps are divided.

    Attributes:
        budget: padded tokens of a micro-batch; None: a number of examples.
        size: examples of a micro-batch.
        has_lengths: whether lengths are known before an example is built; if not, each rank sorts its own share of a step.
    """

    name: str
    budget: int | None = None
    size: int = 4
    has_lengths: bool = True

    def passes(self, lengths: np.ndarray, ranks: int) -> Passes:
        """Returns the padded tokens of a step with examples of these lengths."""
        if self.budget is not None:
            return [[group.padded_tokens for group in groups] for groups in divide_step(lengths.tolist(), self.budget, ranks)]
        size = max(1, min(self.size, len(lengths) // ranks))
        if self.has_lengths:
            parts = np.sort(lengths)[::-1].reshape(-1, ranks, size)
        else:
            shares = lengths.reshape(-1, ranks, size).swapaxes(0, 1).reshape(ranks, -1)
            parts = np.sort(shares)[:, ::-1].reshape(ranks, -1, size).swapaxes(0, 1)
        padded: Passes = (size * parts.max(-1)).tolist()
        return padded


def image_lengths(number: int) -> np.ndarray:
    """Draws lengths like those of LLaVA-1.5's mix of 665,000 rows.

    70% have 1 to 12 short questions and answers (VQA, GQA, OCR-VQA, Visual Genome, RefCOCO) of 24 tokens each, 24% long answers
    (LLaVA-Instruct: median 190 tokens), 6% no image (ShareGPT: median 900). An image has 576 to 2900 tokens, all magnitudes
    equally frequent.
    """
    draw = np.random.default_rng(0)
    short = draw.integers(1, 13, number) * 24 + draw.integers(0, 30, number)
    long = np.exp(draw.normal(np.log(190), 0.45, number)) + 40
    alone = np.exp(draw.normal(np.log(900), 0.8, number)) + 20
    image = np.exp(draw.uniform(np.log(576), np.log(2900), number))
    kind = draw.choice(3, number, p=[0.70, 0.24, 0.06])
    lengths = np.select([kind == 0, kind == 1], [image + short, image + long], alone)
    return np.minimum(LONGEST["image"], lengths).astype(np.int64)


def video_lengths(number: int) -> np.ndarray:
    """Draws lengths of questions about videos: 8, 16 or 32 frames of 98 to 196 tokens, and an answer of median 150 tokens."""
    draw = np.random.default_rng(1)
    frames = draw.choice([8, 16, 32], number, p=[0.2, 0.3, 0.5])
    lengths = frames * draw.integers(98, 197, number) + np.exp(draw.normal(np.log(150), 0.7, number)) + 40
    return np.minimum(LONGEST["video"], lengths).astype(np.int64)


DISTRIBUTIONS: dict[str, Callable[[int], np.ndarray]] = {"image": image_lengths, "video": video_lengths}


def measure(number: int, step_size: int, budgets: list[int]) -> str:
    """Returns the figures of every division for both distributions and 8, 32 and 64 ranks, as the text to print."""
    divisions = [Division("examples, lengths unknown", has_lengths=False), Division("examples")]
    divisions += [Division(f"{budget} tokens", budget) for budget in budgets]
    header = ("", "ranks", "micro-batches of", "passes", "real / padded", "mean / max", "real / critical")
    rows = [
        (name, str(ranks), division.name, *(f"{figure:.{digits}f}" for figure, digits in zip(found, (1, 3, 3, 3), strict=True)))
        for name, draw in DISTRIBUTIONS.items()
        for lengths in [draw(number)]
        for ranks in RANKS
        for division in divisions
        for found in [figures(lengths, division, ranks, step_size)]
    ]
    described = "\n".join(
        f"{name}: {number} examples of {lengths.min()} to {lengths.max()} tokens, median {np.median(lengths):.0f}"
        for name, draw in DISTRIBUTIONS.items()
        for lengths in [draw(number)]
    )
    return f"steps of {step_size} examples, grouped over {TrainConfig.length_window}\n{described}\n\n" + text_table(
        header, rows, "<><>>>>"
    )


def figures(lengths: np.ndarray, division: Division, ranks: int, step_size: int) -> tuple[float, float, float, float]:
    """Returns passes per step, real / padded tokens, mean work of the ranks / the largest, and real tokens / critical path."""
    if len(lengths) % step_size:
        raise ValueError(f"--examples {len(lengths)}: allowed: a multiple of --step {step_size}")
    steps = [division.passes(step, ranks) for step in _steps(lengths, step_size, division.has_lengths)]
    passes = [np.array(one) for step in steps for one in step]
    real, padded = lengths.sum(), sum(one.sum() for one in passes)
    critical = sum(one.max() * ranks for one in passes)
    return len(passes) / len(steps), real / padded, padded / critical, real / critical


def _steps(lengths: np.ndarray, step_size: int, has_lengths: bool) -> Iterator[np.ndarray]:
    """Yields the lengths of the examples of every step of an epoch."""
    order = permutation(len(lengths), 0, "epoch", 0)
    if has_lengths:
        order = group_by_length(order, lengths, 0, step_size, TrainConfig.length_window, 0)
    for first in range(0, len(lengths), step_size):
        yield lengths[order[first : first + step_size]]

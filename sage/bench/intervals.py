"""Bootstrap confidence intervals over prompts.

Prompts are resampled, not repeats: they differ far more from each other than the repeats of one prompt, which are reduced to a
median beforehand. Method and baseline are resampled together, so the difficulty of a prompt, which affects both, cancels.

Legend: P prompts, R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LEVEL = 0.95
RESAMPLES = 2000


def ratio_interval(
    tokens: Sequence[float],
    seconds: Sequence[float],
    base_tokens: Sequence[float],
    base_seconds: Sequence[float],
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Returns the interval of (sum tokens / sum seconds) / (sum base_tokens / sum base_seconds), prompts resampled in pairs.

    Returns:
        (low, high); None for fewer than two prompts, or if nothing was decoded.
    """
    drawn = _draws(len(tokens), resamples, seed)
    if drawn is None:
        return None
    speed_R = _rate(tokens, seconds, drawn) / _rate(base_tokens, base_seconds, drawn)
    return _quantiles(speed_R, level)


def rate_interval(
    tokens: Sequence[float], seconds: Sequence[float], level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """Returns the interval of sum tokens / sum seconds under resampling of prompts; None for fewer than two prompts."""
    drawn = _draws(len(tokens), resamples, seed)
    return None if drawn is None else _quantiles(_rate(tokens, seconds, drawn), level)


def _draws(num_prompts: int, resamples: int, seed: int) -> Tensor | None:
    """Returns prompt indices [R, P] drawn with replacement."""
    if num_prompts < 2:
        return None
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_prompts, (resamples, num_prompts), generator=generator)


def _rate(tokens: Sequence[float], seconds: Sequence[float], drawn_RP: Tensor) -> Tensor:
    """Returns tokens per second [R] of every resample."""
    tokens_P = torch.tensor(tokens, dtype=torch.float64)
    seconds_P = torch.tensor(seconds, dtype=torch.float64)
    return tokens_P[drawn_RP].sum(1) / seconds_P[drawn_RP].sum(1).clamp_min(1e-12)


def _quantiles(values_R: Tensor, level: float) -> tuple[float, float] | None:
    tail = (1.0 - level) / 2.0
    finite = values_R[torch.isfinite(values_R)]  # a resample of one-token answers only has no decoding speed
    if not len(finite):
        return None
    low, high = torch.quantile(finite, torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    return low, high

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


def rate_interval(
    tokens: Sequence[float],
    seconds: Sequence[float],
    base_tokens: Sequence[float] = (),
    base_seconds: Sequence[float] = (),
) -> tuple[float, float] | None:
    """Returns the interval (low, high) of sum tokens / sum seconds, with a base over that of the base, prompts resampled in
    pairs; None for fewer than two prompts, or if nothing was decoded.
    """
    if len(tokens) < 2:
        return None
    rates_R = _rates(tokens, seconds)
    return _quantiles(rates_R / _rates(base_tokens, base_seconds) if base_tokens else rates_R)


def _rates(tokens: Sequence[float], seconds: Sequence[float]) -> Tensor:
    """Returns tokens per second [R] of every resample; the same prompts are drawn, with replacement, in every call."""
    drawn_RP = torch.randint(len(tokens), (RESAMPLES, len(tokens)), generator=torch.Generator().manual_seed(0))
    tokens_P = torch.tensor(tokens, dtype=torch.float64)
    seconds_P = torch.tensor(seconds, dtype=torch.float64)
    return tokens_P[drawn_RP].sum(1) / seconds_P[drawn_RP].sum(1).clamp_min(1e-12)


def _quantiles(values_R: Tensor) -> tuple[float, float] | None:
    tail = (1.0 - LEVEL) / 2.0
    finite = values_R[torch.isfinite(values_R)]  # a resample of one-token answers only has no decoding speed
    if not len(finite):
        return None
    low, high = torch.quantile(finite, torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    return low, high

"""The greedy choice of a pass, part of the functions that are compiled and captured."""

from __future__ import annotations

from torch import Tensor

NAN_TOKEN = -1  # in place of a token where a logit is NaN


def greedy_tokens(logits: Tensor) -> Tensor:
    """Returns the argmax of each row of logits [N, V], `NAN_TOKEN` where a logit is NaN, LongTensor [N]."""
    is_nan = logits.amax(-1).isnan()  # `max` also returns the index and is slower than `amax` and `argmax` together
    return logits.argmax(-1).masked_fill(is_nan, NAN_TOKEN)

"""Warnings about a measured draft: an acceptance rate near zero, and a measurement far below the estimate from training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sage.trees import AUTOREGRESSIVE

MIN_TOKENS_PER_PASS = 1.1  # without a draft it is 1
MIN_MEASURED_RATIO = 0.6  # measured over estimated tokens per target pass of a chain; usually around 1


def low_acceptance_warning(report: Mapping[str, Any]) -> str | None:
    """Returns a warning if no drafting policy in report.json exceeds about one token per target pass, else None."""
    drafting = [part for name, part in report["policies"].items() if name != AUTOREGRESSIVE]
    best = max((part["tokens_per_target_pass"] for part in drafting), default=MIN_TOKENS_PER_PASS)
    if best >= MIN_TOKENS_PER_PASS:
        return None
    return (
        f"acceptance rate is near zero: {best:.2f} tokens per target pass at best; expected at the start of training, "
        "otherwise see docs/troubleshooting.md"
    )


def below_estimate_warning(step: int, measured: float | None, estimate: float | None) -> str | None:
    """Returns a warning if the policy `chain` was measured far below the estimate from the training batches, else None.

    Both are tokens per target pass: measured for `chain`, and the last `estimated_tokens_per_pass` before `step`.
    """
    if measured is None or not estimate or measured >= MIN_MEASURED_RATIO * estimate:
        return None
    return (
        f"step {step}: {measured:.2f} tokens per target pass measured for chain, {estimate:.2f} estimated on the training "
        "batches; see docs/troubleshooting.md"
    )

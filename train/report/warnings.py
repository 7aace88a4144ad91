"""Warnings about a measured draft: an acceptance rate near zero, and a measurement far below the estimate from training.

Owns: thresholds and messages. Does not own: the measurement, the pages that show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sage.trees.names import AUTOREGRESSIVE

MIN_TOKENS_PER_PASS = 1.1  # without a draft it is 1
MIN_MEASURED_RATIO = 0.6  # measured over estimated tokens per target pass of a chain; usually around 1
LOW_ACCEPTANCE = (
    "acceptance rate is near zero: {best:.2f} tokens per target pass at best; expected at the start of training, "
    "otherwise see docs/troubleshooting.md"
)
BELOW_ESTIMATE = (
    "step {step}: {measured:.2f} tokens per target pass measured for chain, {estimate:.2f} estimated on the training batches; "
    "see docs/troubleshooting.md"
)


def low_acceptance_warning(report: Mapping[str, Any]) -> str | None:
    """Returns a warning if no drafting policy exceeds about one token per target pass, else None.

    Args:
        report: the content of report.json.
    """
    drafting = [part for name, part in report["policies"].items() if name != AUTOREGRESSIVE]
    best = max((part["tokens_per_target_pass"] for part in drafting), default=MIN_TOKENS_PER_PASS)
    return LOW_ACCEPTANCE.format(best=best) if best < MIN_TOKENS_PER_PASS else None


def below_estimate_warning(step: int, measured: float | None, estimate: float | None) -> str | None:
    """Returns a warning if the policy `chain` was measured far below the estimate from the training batches, else None.

    Args:
        measured: tokens per target pass of the policy `chain`; None if it was not measured.
        estimate: the last `estimated_tokens_per_pass` before `step`.
    """
    if measured is None or not estimate or measured >= MIN_MEASURED_RATIO * estimate:
        return None
    return BELOW_ESTIMATE.format(step=step, estimate=estimate, measured=measured)

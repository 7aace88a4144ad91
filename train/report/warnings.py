"""What a measurement says about draft and decoder, where the figures alone would leave a person guessing.

Two pains that look alike: a draft that is never accepted, and a draft that does well on the training batches and fails when
it is served. Owns: the sentences. Does not own: measuring, reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sage.trees.names import AUTOREGRESSIVE

HARDLY_TOKENS = 1.1  # per target pass; without a draft it is 1
DOUBT_RATIO = 0.6  # measured over estimated tokens per target pass of a chain; sound runs lie around 1


def is_hardly_accepted(report: Mapping[str, Any]) -> str | None:
    """A sentence if no policy that drafts gets noticeably more than one token per target pass, else None.

    Args:
        report: the content of report.json.
    """
    drafting = {name: part for name, part in report["policies"].items() if name != AUTOREGRESSIVE}
    best = max((part["tokens_per_target_pass"] for part in drafting.values()), default=HARDLY_TOKENS)
    if best >= HARDLY_TOKENS:
        return None
    return (
        f"hardly a drafted token is accepted: {best:.2f} tokens per target pass at best; every draft begins like this, "
        f"for one that has been trained see docs/troubleshooting.md"
    )


def falls_short(step: int, chain: float | None, estimate: float | None) -> str | None:
    """A sentence if the decoder measured far less for `chain` than the training batches promise, else None.

    Args:
        chain: tokens per target pass as measured for the policy `chain`; None if it was not measured.
        estimate: the last `estimated_tokens_per_pass` before `step`.
    """
    if chain is None or not estimate or chain >= DOUBT_RATIO * estimate:
        return None
    return (
        f"step {step}: the training batches promise {estimate:.2f} tokens per target pass, the decoder measured {chain:.2f} "
        f"for chain; see docs/troubleshooting.md"
    )

"""Device synchronizations and copies to the device per decoding round, counted on the pretend accelerator.

The prefill is not counted.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from support.accelerator import Kind, Traffic

import sage
from sage.decoding import generation
from sage.drafts.draft import Draft
from sage.planning.base import Policy

MAX_UPLOADS = 2  # to the device per round


@dataclass
class RoundCounts:
    """Counts of one round: levels drafted, synchronizations, copies to the device, those of them that wait."""

    levels: int
    synchronizations: int
    uploads: int
    blocking_uploads: int


@dataclass
class Counts:
    """Counts of one answer; `lines` as in `Traffic`."""

    tokens: list[int]
    rounds: list[RoundCounts]
    lines: Counter[tuple[Kind, str]]


def count_rounds(
    traffic: Traffic, target: sage.Target, draft: Draft | None, inputs: Any, policy: Policy, **options: Any
) -> Counts:
    """Decodes one prompt; `target` and `draft` lie on the accelerator. Arguments as for `sage.generate`."""
    request, levels = generation.start(target, draft, inputs, policy, **options), list[None]()
    session: Any = request.request.session
    if session is not None:
        propose = session.propose
        session.propose = lambda *given, **more: levels.append(None) or propose(*given, **more)
    rounds, lines = [], Counter[tuple[Kind, str]]()
    for number, _ in enumerate(request.rounds()):
        if number:
            rounds.append(RoundCounts(len(levels), traffic.synchronizations, traffic.uploads, traffic.blocking_uploads))
            lines += traffic.lines
        levels.clear()
        traffic.reset()
    return Counts(request.tokens, rounds, lines)

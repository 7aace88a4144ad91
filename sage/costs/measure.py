"""Measures, in a second or two at start-up, what a target pass and a draft level cost on this machine.

Shapes: N verified nodes (the root included), W nodes of one draft level, S context tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from sage.costs.tables import Costs, Curve
from sage.drafts import Draft, DraftSession, new_session
from sage.targets import Target

VERIFY_NODES = (1, 2, 4, 8, 16, 32, 64)
DRAFT_WIDTHS = (1, 2, 4, 8, 16)
LONGER_NODES = 16
NUM_CANDIDATES = 10
REPEATS = 16
LEAST_SPAN = 1024  # tokens between the two contexts


@torch.inference_mode()
def measure_costs(target: Target, draft: Draft, context: int, longer: int) -> Costs:
    """Times target passes and draft levels on a made-up context; a second or two.

    Args:
        context: S to measure at.
        longer: a second S, for the dependence on the context. `LEAST_SPAN` above `context` is used if that is more and within
            the target's limit: over fewer tokens the difference is noise.
    """
    room = max(VERIFY_NODES)
    limit = int(target.text_config.max_position_embeddings) - room
    longer = max(longer, min(context + LEAST_SPAN, limit))
    cache = target.new_cache(longer + room)
    cache.storage.zero_()

    def verify(nodes: int, length: int) -> Callable[[], None]:
        tokens = torch.zeros(nodes, dtype=torch.long, device=target.device)
        visible = torch.ones(nodes, nodes, dtype=torch.bool, device=target.device).tril()

        def once() -> None:
            cache.crop_to(length)
            target.lm_head(target.tree_pass(tokens, tokens + length, visible, cache).last)

        return once

    session = new_session(draft, target, context + room)
    levels = _seconds([_draft_level(session, width, context, target.device) for width in DRAFT_WIDTHS], target.device)
    passes = [verify(nodes, context) for nodes in VERIFY_NODES]
    *at_context, at_longer = _seconds([*passes, verify(LONGER_NODES, longer)], target.device)
    grown = max(at_longer - at_context[VERIFY_NODES.index(LONGER_NODES)], 0.0)
    return Costs(
        verify=Curve(list(VERIFY_NODES), at_context),
        draft=Curve(list(DRAFT_WIDTHS), levels),
        context=context,
        verify_per_token=grown / max(longer - context, 1),
    )


def _draft_level(session: DraftSession, width: int, context: int, device: torch.device) -> Callable[[], None]:
    rows = torch.arange(width, device=device)

    def once() -> None:
        session.set_synthetic_state(context, width)
        session.propose(session.expand(rows, torch.zeros_like(rows)), NUM_CANDIDATES)

    return once


def _seconds(work: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
    """The lower quartile of a few runs of each after a warm-up, taken in turns: a busy spell of the machine hits all alike."""
    times: list[list[float]] = [[] for _ in work]
    for _ in range(REPEATS + 1):
        for own, once in zip(times, work, strict=True):
            _wait(device)
            start = time.perf_counter()
            once()
            _wait(device)
            own.append(time.perf_counter() - start)
    return [statistics.quantiles(own[1:], n=4)[0] for own in times]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

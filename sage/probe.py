"""Measures, in a second or two at start-up, what a target pass and a draft level cost on this machine.

Shapes: N verified nodes (the root included), W nodes of one draft level, S context tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from sage.costs import Costs, Curve
from sage.drafts import Draft, DraftSession, new_session
from sage.targets import Target

VERIFY_NODES = (1, 2, 4, 8, 16, 32, 64)
DRAFT_WIDTHS = (1, 4, 10, 32)
REPEATS = 3


@torch.inference_mode()
def measure_costs(target: Target, draft: Draft, context: int, longer: int) -> Costs:
    """Times target passes and draft levels on a made-up context; a second or two.

    Args:
        context: S to measure at.
        longer: a second S, for the dependence on the context.
    """
    room = max(VERIFY_NODES)
    cache = target.new_cache(longer + room)
    cache.storage.zero_()

    def verify(nodes: int, length: int) -> float:
        tokens = torch.zeros(nodes, dtype=torch.long, device=target.device)
        visible = torch.ones(nodes, nodes, dtype=torch.bool, device=target.device).tril()

        def once() -> None:
            cache.crop_to(length)
            target.lm_head(target.tree_pass(tokens, tokens + length, visible, cache).last)

        return _seconds(once, target.device)

    session = new_session(draft, target, context + room)
    return Costs(
        verify=Curve(list(VERIFY_NODES), [verify(nodes, context) for nodes in VERIFY_NODES]),
        draft=Curve(list(DRAFT_WIDTHS), [_draft_level(session, width, context, target.device) for width in DRAFT_WIDTHS]),
        context=context,
        verify_per_token=max(verify(16, longer) - verify(16, context), 0.0) / max(longer - context, 1),
    )


def _draft_level(session: DraftSession, width: int, context: int, device: torch.device) -> float:
    rows = torch.arange(width, device=device)

    def once() -> None:
        session.pretend(context, width)
        logits = session.expand(rows, torch.zeros_like(rows))
        logits.float().softmax(-1).topk(min(10, logits.shape[-1]))

    return _seconds(once, device)


def _seconds(once: Callable[[], None], device: torch.device) -> float:
    """Median wall time of a few runs after a warm-up."""
    times = []
    for _ in range(REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        once()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])

"""The memory of the caches of a server, planned before it starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage.drafts.draft import Draft, new_session
from sage.io.machine import free_bytes
from sage.targets import Target
from sage.targets.tree_passes import TreePasses

GB = 1e9


@dataclass(frozen=True)
class CachePlan:
    """Memory of the caches of target and draft.

    Attributes:
        per_request: bytes of a request with the longest context.
        free: bytes of the device; None if unknown.
    """

    per_request: int
    free: int | None

    def check(self, max_requests: int, max_context: int) -> None:
        """Raises ValueError if the caches of all requests do not fit."""
        needed = self.per_request * max_requests
        if self.free is None or needed <= self.free:
            return
        fits = self.free // self.per_request
        remedy = f"give at most --max-requests {fits}, or" if fits else "give"
        raise ValueError(
            f"--max-requests {max_requests}: caches for {max_context} tokens each take {needed / GB:.2f} GB, and "
            f"{self.free / GB:.2f} GB are free; {remedy} a lower --max-context"
        )


@torch.inference_mode()
def plan_caches(target: Target, draft: Draft | None, max_context: int, tree_capacity: int) -> CachePlan:
    """Returns the memory of the caches of a request of `max_context` tokens, given the nodes of the largest tree."""
    capacity = max_context + tree_capacity
    session = None if draft is None else new_session(draft, target, 1)
    levels = session.levels if session else ()
    rows = TreePasses(target, levels).capacity(capacity)
    per_token = sum(buffer.nbytes for buffer in target.new_cache(1).buffers)
    per_request = rows * per_token
    if session is not None:
        cache = session.cache  # type: ignore[attr-defined]
        per_request += rows * sum(buffer.nbytes for buffer in cache.buffers) // cache.capacity
    return CachePlan(per_request, free_bytes(target.device))

"""The decoder of the server: a `BatchDecoder` whose policy keeps what it has learned from one request to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sage.costs.store import known_costs
from sage.decoding.batch import BatchDecoder, BatchRequest
from sage.decoding.decoder import Round
from sage.decoding.settings import Sampling
from sage.drafts.draft import Draft
from sage.planning.base import Policy
from sage.serving.settings import ServerLimits
from sage.targets import Target
from sage.trees import policy as new_policy


def served_policy(target: Target, draft: Draft | None, name: str, contexts: tuple[int, int]) -> Policy:
    """Returns the policy whose copies decode all requests.

    Args:
        contexts: the shortest and the longest context that costs are measured at, in tokens.
    """
    found = new_policy(name)
    if draft is not None and found.needs_costs:
        found.costs = known_costs(target, draft, *contexts)
    return found


class ServedDecoder:
    """Decodes up to `limits.max_requests` requests; used by one thread."""

    def __init__(self, target: Target, draft: Draft | None, policy: Policy, limits: ServerLimits) -> None:
        self._policy = policy
        self._decoder = BatchDecoder(target, draft, limits.max_requests, limits.prefill_tokens)

    def add(self, inputs: Any, sampling: Sampling) -> BatchRequest:
        """Starts a request, which joins in the next step; ValueError for one that the target cannot decode."""
        return self._decoder.add(inputs, self._policy, sampling=sampling)

    def step(self) -> Sequence[tuple[BatchRequest, Round]]:
        """Runs a round of every request; returns what each has emitted. A request may have failed, see its `error`."""
        return self._decoder.step()

    def remove(self, request: BatchRequest) -> None:
        """Ends a request, finished or not; its place is free for the next one."""
        self._decoder.remove(request)

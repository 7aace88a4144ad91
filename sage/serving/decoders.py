"""The decoder of the server: a `BatchDecoder` whose policies keep what they have learned from one request to the next."""

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


class PolicyPool:
    """One policy per place.

    Args:
        policy: the name of a policy.
        contexts: the shortest and the longest context that costs are measured at, in tokens.
    """

    def __init__(self, target: Target, draft: Draft | None, policy: str, size: int, contexts: tuple[int, int]) -> None:
        self._free: list[Policy] = [new_policy(policy) for _ in range(size)]
        if draft is not None and self._free[0].needs_costs:
            costs = known_costs(target, draft, *contexts)
            for one in self._free:
                one.costs = costs

    @property
    def tree_capacity(self) -> int:
        """Nodes of the largest tree."""
        return self._free[0].tree_capacity

    def take(self) -> Policy:
        """Returns a free policy."""
        return self._free.pop()

    def give_back(self, policy: Policy) -> None:
        """Frees a policy."""
        self._free.append(policy)


class ServedDecoder:
    """Decodes up to `limits.max_requests` requests; used by one thread."""

    def __init__(self, target: Target, draft: Draft | None, policies: PolicyPool, limits: ServerLimits) -> None:
        self._policies = policies
        self._decoder = BatchDecoder(target, draft, limits.max_requests, limits.prefill_tokens)

    def add(self, inputs: Any, sampling: Sampling) -> BatchRequest:
        """Starts a request, which joins in the next step; ValueError for one that the target cannot decode."""
        policy = self._policies.take()
        try:
            return self._decoder.add(inputs, policy, sampling=sampling)
        except BaseException:
            self._policies.give_back(policy)
            raise

    def step(self) -> Sequence[tuple[BatchRequest, Round]]:
        """Runs a round of every request; returns what each has emitted. A request may have failed, see its `error`."""
        return self._decoder.step()

    def remove(self, request: BatchRequest) -> None:
        """Ends a request, finished or not; its place is free for the next one."""
        self._decoder.remove(request)
        self._policies.give_back(request.generation.request.policy)

"""The decoder of the server: a `BatchDecoder` whose policy keeps what it has learned from one request to the next.

Before the first request, the caches are planned and a few tokens are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sage.costs.store import known_costs
from sage.decoding.batch import BatchDecoder, BatchRequest
from sage.decoding.decoder import Round
from sage.decoding.settings import Sampling
from sage.drafts.draft import Draft
from sage.planning.base import Policy
from sage.serving.memory import plan_caches
from sage.serving.settings import DEFAULT_CONTEXT, ServerLimits
from sage.targets import Target
from sage.trees import AUTOREGRESSIVE
from sage.trees import policy as new_policy

SHORTEST = 64  # tokens; costs of passes are measured from here on
WARM_UP_TOKENS = 8


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


def planned_decoder(
    target: Target, draft: Draft | None, policy: str, limits: ServerLimits
) -> tuple[Callable[[], ServedDecoder], int]:
    """Plans the caches and decodes a few tokens, so that no request waits for what is done once.

    Returns:
        what creates the decoder, and the tokens of a prompt and its answer at most.

    Raises:
        ValueError: the caches do not fit, the context is longer than the target's, or the target cannot chat.
    """
    longest = int(target.text_config.max_position_embeddings)
    max_context = limits.max_context or min(DEFAULT_CONTEXT, longest)
    if max_context > longest:
        raise ValueError(f"--max-context: {max_context}, and the target's context length is {longest}; give at most that")
    drafting = draft if policy != AUTOREGRESSIVE else None
    shared = served_policy(target, drafting, policy, (min(SHORTEST, max_context), max_context))
    plan_caches(target, drafting, max_context, shared.tree_capacity).check(limits.max_requests, max_context)

    def new_decoder() -> ServedDecoder:
        return ServedDecoder(target, drafting, shared, limits)

    _warm_up(new_decoder(), target, max_context, min(limits.max_requests, 2))
    return new_decoder, max_context


def _warm_up(decoder: ServedDecoder, target: Target, max_context: int, count: int) -> None:
    """Decodes `count` requests: passes of one request and of several."""
    inputs = target.prepare([{"role": "user", "content": "Hello"}])
    sampling = Sampling(max_new_tokens=min(WARM_UP_TOKENS, max_context - inputs["input_ids"].shape[1]))
    requests = [decoder.add(inputs, sampling) for _ in range(count)]
    while not all(request.is_over for request in requests):
        decoder.step()
    for request in requests:
        decoder.remove(request)
        if request.error is not None:
            raise request.error

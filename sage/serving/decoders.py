"""Several requests decoded together, round by round: what the decoding thread asks of a decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sage.costs.store import known_costs
from sage.decoding.answer import Stats
from sage.decoding.decoder import Round
from sage.decoding.generation import Generation, start
from sage.decoding.settings import Sampling
from sage.drafts.draft import Draft
from sage.planning.base import Policy
from sage.targets import Target
from sage.trees import policy as new_policy

Emitted = Round | Exception


class Answer(Protocol):
    """An answer in progress."""

    @property
    def stats(self) -> Stats:
        """Counts so far; times once the answer is removed."""

    @property
    def tokens(self) -> Sequence[int]:
        """Tokens emitted so far."""

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended."""


class RequestDecoder(Protocol):
    """Decodes up to `max_requests` requests; used by one thread."""

    @property
    def max_requests(self) -> int:
        """Requests that can be decoded at the same time."""

    def add(self, inputs: Any, sampling: Sampling) -> Any:
        """Starts a request; returns its `Answer`. Raises ValueError for one that the target cannot decode."""

    def step(self) -> Sequence[tuple[Any, Emitted]]:
        """Runs a round of every request; returns what each has emitted, or the error that ends it."""

    def remove(self, answer: Any) -> None:
        """Ends a request, finished or not; its place is free for the next one."""


class PolicyPool:
    """One policy per place, so that what a policy has learned outlives its requests.

    Args:
        name: of the policy.
        contexts: the shortest and the longest contexts that costs are measured at.
    """

    def __init__(self, target: Target, draft: Draft | None, name: str, size: int, contexts: tuple[int, int]) -> None:
        self._free: list[Policy] = [new_policy(name) for _ in range(size)]
        if draft is not None and self._free[0].needs_costs:
            costs = known_costs(target, draft, *contexts)
            for policy in self._free:
                policy.costs = costs

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


@dataclass(eq=False)
class InterleavedAnswer:
    """A generation in progress and its rounds."""

    generation: Generation
    rounds: Iterator[Round]
    policy: Policy

    @property
    def stats(self) -> Stats:
        return self.generation.stats

    @property
    def tokens(self) -> Sequence[int]:
        return self.generation.tokens

    @property
    def is_over(self) -> bool:
        return self.generation.request.stop.is_over


class InterleavedDecoder:
    """Decodes requests in turns, one target pass each per round."""

    def __init__(self, target: Target, draft: Draft | None, policies: PolicyPool, max_requests: int) -> None:
        self._target, self._draft, self._policies = target, draft, policies
        self.max_requests = max_requests
        self._active: list[InterleavedAnswer] = []

    def add(self, inputs: Any, sampling: Sampling) -> InterleavedAnswer:
        """Starts a request: embeds its prompt; `step` runs the prefill."""
        policy = self._policies.take()
        try:
            generation = start(self._target, self._draft, inputs, policy, sampling=sampling)
        except BaseException:
            self._policies.give_back(policy)
            raise
        answer = InterleavedAnswer(generation, generation.rounds(), policy)
        self._active.append(answer)
        return answer

    def step(self) -> list[tuple[InterleavedAnswer, Emitted]]:
        """Runs a round of every request; an error concerns its own request only."""
        return [(answer, _next_round(answer)) for answer in self._active]

    def remove(self, answer: InterleavedAnswer) -> None:
        """Ends a request and frees its cache."""
        self._active.remove(answer)
        answer.rounds.close()  # type: ignore[attr-defined]
        self._policies.give_back(answer.policy)


def _next_round(answer: InterleavedAnswer) -> Emitted:
    try:
        return next(answer.rounds)
    except Exception as error:
        return error

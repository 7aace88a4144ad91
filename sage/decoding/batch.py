"""Several requests of one target and one draft, decoded together: requests join and leave between rounds.

Every request keeps its own policy, seed, sampling parameters, prompt length and end; its text is the one that it has alone.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from sage.decoding.decoder import Round
from sage.decoding.generation import Generation, Output, start
from sage.drafts.draft import Draft
from sage.planning.base import Policy
from sage.targets import Target
from sage.trees import DEFAULT_POLICY


@dataclass(eq=False)
class BatchRequest:
    """A request of a `BatchDecoder`, which identifies it.

    Attributes:
        error: what ended it early; its other figures are those until then.
    """

    generation: Generation
    error: Exception | None = None
    _rounds: Iterator[Round] | None = field(default=None, repr=False)

    @property
    def tokens(self) -> list[int]:
        """Tokens emitted so far."""
        return self.generation.tokens

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete, or has failed."""
        return self.error is not None or self.generation.request.stop.is_over

    def output(self) -> Output:
        """Returns the answer so far; raises `error` if there is one."""
        if self.error is not None:
            raise self.error
        return self.generation.output()


class BatchDecoder:
    """Decodes up to `max_requests` requests together; others wait in the order in which they were added.

    Args:
        target: the vision-language model.
        draft: the draft of all requests; None if no request drafts.
        max_requests: requests that are decoded together.
    """

    def __init__(self, target: Target, draft: Draft | None, max_requests: int = 8) -> None:
        if max_requests < 1:
            raise ValueError(f"max_requests: {max_requests}; allowed: at least 1")
        self.target, self.draft, self.max_requests = target, draft, max_requests
        self._waiting: deque[BatchRequest] = deque()
        self._active: list[BatchRequest] = []

    def __len__(self) -> int:
        """Requests that are decoded or wait."""
        return len(self._active) + len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether a request that is added now would take part in the next step."""
        return len(self) < self.max_requests

    def add(self, inputs: Any, policy: str | Policy = DEFAULT_POLICY, **options: Any) -> BatchRequest:
        """Adds a request, which joins in a following `step`; arguments and errors as of `sage.generate`.

        Args:
            policy: a name, or a policy that the request decodes with a copy of.
        """
        policy = copy.deepcopy(policy)
        drafts = policy != "autoregressive" if isinstance(policy, str) else policy.num_candidates > 0
        with torch.inference_mode():
            generation = start(self.target, self.draft if drafts else None, inputs, policy, **options)
        request = BatchRequest(generation)
        self._waiting.append(request)
        return request

    def step(self) -> list[tuple[BatchRequest, Round]]:
        """Runs one round of every request; returns what each has emitted, the first time the token of its prefill.

        A request whose answer is over has left. One that has failed is returned with a round of no tokens.
        """
        while self._waiting and len(self._active) < self.max_requests:
            request = self._waiting.popleft()
            request._rounds = request.generation.rounds()
            self._active.append(request)
        done = [(request, self._round_of(request)) for request in self._active]
        for request, _ in done:
            if request.is_over:
                self.remove(request)
        return done

    def _round_of(self, request: BatchRequest) -> Round:
        assert request._rounds is not None
        try:
            return next(request._rounds)
        except Exception as error:
            request.error = error
            return Round([], 0)

    def remove(self, request: BatchRequest) -> None:
        """Ends a request, whether it is complete or not; does nothing if it has left."""
        if request in self._waiting:
            self._waiting.remove(request)
        if request in self._active:
            self._active.remove(request)
            if request._rounds is not None:
                request._rounds.close()  # type: ignore[attr-defined]


def generate_batch(
    target: Target,
    draft: Draft | None,
    inputs: Iterable[Any],
    policy: str | Policy = DEFAULT_POLICY,
    *,
    batch_size: int = 8,
    **options: Any,
) -> list[Output]:
    """Decodes several prompts, up to `batch_size` of them together; the texts are those of `sage.generate`.

    Args:
        inputs: of each prompt, as for `sage.generate`; prepared inputs are taken as requests leave.
        options: as for `sage.generate`, the same for all prompts.

    Raises:
        ValueError: as `sage.generate`, or for a batch size below 1.
    """
    decoder = BatchDecoder(target, draft, batch_size)
    requests = []
    for one in inputs:
        while not decoder.has_room:
            decoder.step()
        requests.append(decoder.add(one, policy, **options))
    while len(decoder):
        decoder.step()
    return [request.output() for request in requests]

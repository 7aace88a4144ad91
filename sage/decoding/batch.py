"""Several requests of one target and one draft, decoded together: requests join and leave between rounds.

Every request keeps its own policy, seed, sampling parameters, prompt length and end; its text is the one that it has alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sage.decoding.decoder import Request, Round, attempt, prefill, read_chunk, run_round
from sage.decoding.generation import Generation, Output, start
from sage.drafts.draft import Draft
from sage.planning.base import Policy
from sage.runtime.cache import SharedCache, TreeCache
from sage.targets import Target
from sage.trees import DEFAULT_POLICY
from sage.trees import policy as new_policy


@dataclass(eq=False)
class BatchRequest:
    """A request of a `BatchDecoder`, which identifies it.

    Attributes:
        has_started: whether its prompt is read.
        rows: of the shared caches, which it occupies.
    """

    generation: Generation
    has_started: bool = False
    rows: list[TreeCache] = field(default_factory=list, repr=False)

    @property
    def tokens(self) -> list[int]:
        """Tokens emitted so far."""
        return self.generation.tokens

    @property
    def error(self) -> Exception | None:
        """What ended it early; its other figures are those until then."""
        return self.generation.request.error

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

    A round makes one target pass over the trees of all requests, one draft pass over their accepted tokens, and one per level.
    Prompts are read one by one.

    Args:
        target: the vision-language model.
        draft: the draft of all requests; None if no request drafts.
        max_requests: requests that are decoded together.
        prefill_tokens: tokens of a prompt that the target reads between two rounds of other requests; None for all.
    """

    def __init__(self, target: Target, draft: Draft | None, max_requests: int = 8, prefill_tokens: int | None = None) -> None:
        for name, value in (("max_requests", max_requests), ("prefill_tokens", prefill_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value}; allowed: at least 1")
        self.target, self.draft, self.max_requests = target, draft, max_requests
        self.prefill_tokens = prefill_tokens
        self._waiting: deque[BatchRequest] = deque()
        self._active: list[BatchRequest] = []
        self._caches: dict[str, SharedCache] = {}
        self._policies: dict[str, Policy] = {}

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
            policy: its requests share what they learn (`Policy.for_request`); the same holds for those of a name.
        """
        if isinstance(policy, str):
            policy = self._policies.setdefault(policy, new_policy(policy))
        own = policy.for_request()
        generation = start(self.target, self.draft if own.num_candidates else None, inputs, own, **options)
        policy.costs = policy.costs or own.costs
        generation.request.clock.share()
        request = BatchRequest(generation)
        self._waiting.append(request)
        return request

    @torch.inference_mode()
    def step(self) -> list[tuple[BatchRequest, Round]]:
        """Runs one round of every request; returns what each has emitted, the first time the token of its prefill.

        A request whose answer is over has left. One that has failed is returned with a round of no tokens.
        """
        done = [(request, Round([], 0)) for request in self._admit()]
        done += self._run_rounds([request for request in self._active if request.has_started])
        done += self._read_prompts([request for request in self._active if not request.has_started])
        for request, _ in done:
            if request.is_over:
                self.remove(request)
        return done

    def _admit(self) -> list[BatchRequest]:
        """Gives waiting requests rows of the caches, as long as there is room; returns those that could not have any."""
        failed = []
        while self._waiting and len(self._active) < self.max_requests:
            request = self._waiting.popleft()
            try:
                self._take_rows(request)
            except Exception as error:  # of memory; the others go on with the rows that they have
                request.generation.request.error = error
                failed.append(request)
            else:
                self._active.append(request)
        return failed

    def _take_rows(self, request: BatchRequest) -> None:
        """Moves the empty caches of a request into rows of shared ones."""
        own = request.generation.request
        own.cache = self._row("target", own.cache, request)
        if own.session is not None and own.session.cache is not None:
            own.session.cache = self._row("draft", own.session.cache, request)

    def _row(self, owner: str, cache: TreeCache, request: BatchRequest) -> TreeCache:
        if owner not in self._caches:
            self._caches[owner] = cache.shared.with_rows(self.max_requests)
        row = self._caches[owner].take(cache.capacity)
        request.rows.append(row)
        return row

    def _run_rounds(self, requests: Sequence[BatchRequest]) -> list[tuple[BatchRequest, Round]]:
        rows = [_num_nodes(request) for request in requests]
        running = [request.generation.request for request in requests]
        for request, count in zip(running, rows, strict=True):
            request.policy.share(sum(rows) - count, len(requests))
        return list(zip(requests, run_round(running), strict=True))

    def _read_prompts(self, requests: Sequence[BatchRequest]) -> list[tuple[BatchRequest, Round]]:
        """Reads the prompts of new requests; with `prefill_tokens`, a part of the first one."""
        done = []
        for request in requests if self.prefill_tokens is None else requests[:1]:
            round_ = attempt(request.generation.request, self._read_prompt)
            request.has_started = round_ is not None
            if request.has_started or request.error is not None:
                done.append((request, round_ or Round([], 0)))
        return done

    def _read_prompt(self, request: Request) -> Round | None:
        """Reads a prompt, or a part of it; returns the first round once it has been read."""
        if self.prefill_tokens is not None and read_chunk(request, self.prefill_tokens):
            return None
        return prefill(request)

    def remove(self, request: BatchRequest) -> None:
        """Ends a request, whether it is complete or not; does nothing if it has left."""
        if request in self._waiting:
            self._waiting.remove(request)
        if request in self._active:
            self._active.remove(request)
        for row in request.rows:
            row.shared.release(row)
        request.rows.clear()
        request.generation.stats.time_s = request.generation.request.clock.seconds()


def _num_nodes(request: BatchRequest) -> int:
    """Returns the nodes of a request's last tree, with the root."""
    log = request.generation.stats.rounds_log
    return log[-1]["nodes"] + 1 if log else 1


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

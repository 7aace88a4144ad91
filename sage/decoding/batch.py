"""Several requests of one target and one draft, decoded together: requests join and leave between rounds.

Every request keeps its own policy, seed, sampling parameters, prompt length and end; its text is the one that it has alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sage.decoding.decoder import Request, Round, draft_steps, prefill, read_chunk, verify_steps
from sage.decoding.generation import Generation, Output, start
from sage.drafts.draft import Draft
from sage.drafts.session import JointSession
from sage.planning.base import Policy
from sage.runtime.cache import TreeCache
from sage.runtime.executors import Executor
from sage.runtime.joint import Joined, Steps, together
from sage.runtime.shared_cache import CacheRow, SharedCache
from sage.runtime.timing import prepared_s
from sage.targets import Target
from sage.trees import DEFAULT_POLICY
from sage.trees import policy as new_policy


@dataclass(eq=False)
class BatchRequest:
    """A request of a `BatchDecoder`, which identifies it.

    Attributes:
        error: what ended it early; its other figures are those until then.
        has_started: whether its prompt is read.
        rows: of the shared caches, which it occupies.
    """

    generation: Generation
    error: Exception | None = None
    has_started: bool = False
    rows: list[CacheRow] = field(default_factory=list, repr=False)

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
        generation.request.clock.pause()
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
                request.error = error
                failed.append(request)
            else:
                self._active.append(request)
        return failed

    def _take_rows(self, request: BatchRequest) -> None:
        """Moves the empty caches of a request into rows of shared ones."""
        own = request.generation.request
        own.cache = self._row("target", own.cache, own.passes.executor, request)
        if isinstance(own.session, JointSession):
            own.session.cache = self._row("draft", own.session.cache, own.passes.executor, request)

    def _row(self, owner: str, cache: TreeCache, executor: Executor, request: BatchRequest) -> CacheRow:
        if owner not in self._caches:
            self._caches[owner] = SharedCache(cache, self.max_requests)
            executor.share(self._caches[owner])
        row = self._caches[owner].take(cache.capacity)
        request.rows.append(row)
        return row

    def _run_rounds(self, requests: Sequence[BatchRequest]) -> list[tuple[BatchRequest, Round]]:
        rows = [_num_nodes(one) for one in requests]
        own = [one.generation.request for one in requests]
        started = time.perf_counter()
        for one, count in zip(own, rows, strict=True):
            one.policy.share(sum(rows) - count, len(requests))
        policies = [one.policy for one in own]
        kind = type(policies[0]) if len(set(map(type, policies))) == 1 else None
        if kind is not None:
            kind.begin_together(policies)
        drafting = [Joined(draft_steps(one), one.clock) for one in own]
        together(drafting, self.target.device)
        start = time.perf_counter()
        selected = _select(own, drafting)
        shared_s = (time.perf_counter() - start) / max(len(own), 1)
        verifying = [
            done if done.error is not None else Joined(verify_steps(one, done.result, keep), one.clock)
            for one, done, keep in zip(own, drafting, selected, strict=True)
        ]
        together([one for one in verifying if one.error is None], self.target.device, shared_s)
        done = [(one, self._outcome(one, ended)) for one, ended in zip(requests, verifying, strict=True)]
        if kind is not None:
            ended = time.perf_counter()
            tokens = sum(len(round_.tokens) for _, round_ in done)
            kind.observe_together(policies, tokens, ended - started - prepared_s(started, ended))
        return done

    def _read_prompts(self, requests: Sequence[BatchRequest]) -> list[tuple[BatchRequest, Round]]:
        """Reads the prompts of new requests; with `prefill_tokens`, a part of the first one."""
        done = []
        for request in requests if self.prefill_tokens is None else requests[:1]:
            computation = Joined(self._read_prompt(request), request.generation.request.clock)
            together([computation], self.target.device)
            if request.has_started or computation.error is not None:
                done.append((request, self._outcome(request, computation)))
        return done

    def _read_prompt(self, request: BatchRequest) -> Steps[Round | None]:
        yield from ()
        own = request.generation.request
        if self.prefill_tokens is not None and read_chunk(own, self.prefill_tokens):
            return None
        first = prefill(own)
        request.has_started = True
        return first

    def _outcome(self, request: BatchRequest, computation: Joined) -> Round:
        request.error = computation.error
        return Round([], 0) if request.error is not None else computation.result

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


def _select(requests: Sequence[Request], drafting: Sequence[Joined]) -> list[Sequence[int] | None]:
    """Returns the nodes that each request verifies, for all policies of a class together; None where nothing was drafted."""
    selected: list[Sequence[int] | None] = [None] * len(requests)
    places: dict[type[Policy], list[int]] = {}
    for place, (request, done) in enumerate(zip(requests, drafting, strict=True)):
        if done.error is None and done.result is not None:
            places.setdefault(type(request.policy), []).append(place)
    for kind, own in places.items():
        found = kind.select_together([requests[place].policy for place in own], len(requests))
        for place, keep in zip(own, found, strict=True):
            selected[place] = keep
    return selected


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

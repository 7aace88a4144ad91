"""Several requests of one target and one draft, decoded together: requests join and leave between rounds.

Every request keeps its own policy, seed, sampling parameters, prompt length and end; its text is the one that it has alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sage.decoding.decoder import Request, Round, attempt, prefill, read_chunk, run_round
from sage.decoding.generation import Generation, Output, start
from sage.drafts.draft import Draft
from sage.io.ranges import PositiveInt, check_value
from sage.planning.base import Policy
from sage.runtime.cache import SharedCache, TreeCache
from sage.runtime.timing import decoding_now_s
from sage.targets import Target
from sage.trees import DEFAULT_POLICY
from sage.trees import policy as new_policy


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
            check_value(name, value, PositiveInt | None)
        self.target, self.draft, self.max_requests = target, draft, max_requests
        self.prefill_tokens = prefill_tokens
        self._waiting: deque[Generation] = deque()
        self._active: list[Generation] = []
        self._caches: dict[str, SharedCache] = {}
        self._rows: dict[Generation, list[TreeCache]] = {}  # of the shared caches
        self._policies: dict[str, Policy] = {}

    def __len__(self) -> int:
        """Requests that are decoded or wait."""
        return len(self._active) + len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether a request that is added now would take part in the next step."""
        return len(self) < self.max_requests

    def add(self, inputs: Any, policy: str | Policy = DEFAULT_POLICY, **options: Any) -> Generation:
        """Adds a request, which joins in a following `step`; arguments and errors as of `sage.generate`.

        Args:
            policy: its requests share what they learn (`Policy.for_request`); the same holds for those of a name.
        """
        if isinstance(policy, str):
            policy = self._policies.setdefault(policy, new_policy(policy))
        of_request = policy.for_request()
        draft = self.draft if of_request.num_candidates else None
        generation = start(self.target, draft, inputs, of_request, **options)
        policy.costs = policy.costs or of_request.costs
        generation.request.clock.share()
        self._waiting.append(generation)
        return generation

    @torch.inference_mode()
    def step(self) -> list[tuple[Generation, Round]]:
        """Runs one round of every request; returns what each has emitted, the first time the token of its prefill.

        A request whose answer is over has left. One that has failed is returned with a round of no tokens.
        """
        done = [(generation, Round([], 0)) for generation in self._admit()]
        done += self._run_rounds([generation for generation in self._active if generation.tokens])
        done += self._read_prompts([generation for generation in self._active if not generation.tokens])
        for generation, _ in done:
            if generation.is_over:
                self.remove(generation)
        return done

    def _admit(self) -> list[Generation]:
        """Gives waiting requests rows of the caches, as long as there is room; returns those that could not have any."""
        failed = []
        while self._waiting and len(self._active) < self.max_requests:
            generation = self._waiting.popleft()
            try:
                self._take_rows(generation)
            except Exception as error:  # of memory; the others go on with the rows that they have
                generation.request.error = error
                failed.append(generation)
            else:
                self._active.append(generation)
        return failed

    def _take_rows(self, generation: Generation) -> None:
        """Moves the empty caches of a request into rows of shared ones."""
        request, self._rows[generation] = generation.request, []
        request.cache = self._row("target", request.cache, generation)
        if request.session is not None and request.session.cache is not None:
            request.session.cache = self._row("draft", request.session.cache, generation)

    def _row(self, owner: str, cache: TreeCache, generation: Generation) -> TreeCache:
        if owner not in self._caches:
            self._caches[owner] = cache.shared.with_rows(self.max_requests)
        row = self._caches[owner].take(cache.capacity)
        self._rows[generation].append(row)
        return row

    def _run_rounds(self, generations: Sequence[Generation]) -> list[tuple[Generation, Round]]:
        logs = [generation.stats.rounds_log for generation in generations]
        rows = [log[-1]["nodes"] + 1 if log else 1 for log in logs]  # of the last trees, with their roots
        requests = [generation.request for generation in generations]
        for request, count in zip(requests, rows, strict=True):
            request.policy.share(sum(rows) - count, len(requests))
        started = decoding_now_s()
        rounds = run_round(requests)
        seconds = decoding_now_s() - started
        if len({type(request.policy) for request in requests}) == 1:
            requests[0].policy.observe_together(len(requests), sum(len(round_.tokens) for round_ in rounds), seconds)
        return list(zip(generations, rounds, strict=True))

    def _read_prompts(self, generations: Sequence[Generation]) -> list[tuple[Generation, Round]]:
        """Reads the prompts of new requests; with `prefill_tokens`, a part of the first one."""
        done = []
        for generation in generations if self.prefill_tokens is None else generations[:1]:
            round_ = attempt(generation.request, self._read_prompt)
            if round_ is not None or generation.error is not None:
                done.append((generation, round_ or Round([], 0)))
        return done

    def _read_prompt(self, request: Request) -> Round | None:
        """Reads a prompt, or a part of it; returns the first round once it has been read."""
        if self.prefill_tokens is not None and read_chunk(request, self.prefill_tokens):
            return None
        return prefill(request)

    def remove(self, generation: Generation) -> None:
        """Ends a request, whether it is complete or not; does nothing if it has left."""
        for requests in (self._waiting, self._active):
            if generation in requests:
                requests.remove(generation)
        for row in self._rows.pop(generation, ()):
            row.shared.release(row)
        generation.stats.time_s = generation.request.clock.seconds()


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
    generations = []
    for prompt in inputs:
        while not decoder.has_room:
            decoder.step()
        generations.append(decoder.add(prompt, policy, **options))
    while len(decoder):
        decoder.step()
    return [generation.output() for generation in generations]

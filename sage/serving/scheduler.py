"""Requests on their way to the decoding process and back: places, the queue, cancellations, the end of the server, metrics.

Everything runs in the event loop of the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter as Tally
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from torch import Tensor

from sage.decoding.answer import Stats
from sage.decoding.settings import Sampling
from sage.serving.decoder_process import DecoderProcess, Emitted, Event
from sage.serving.errors import ApiError, internal, invalid, stopping

logger = logging.getLogger(__name__)
MAX_RETRY_S = 60
HUNG_S = 30.0  # without a round; or three times the longest one, where rounds take that long
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)  # of histograms
TOKENS = [2**power for power in range(18)]
SMOOTHING = 0.2  # weight of the newest answer in the mean duration of answers


@dataclass(eq=False)
class Ticket:
    """A request that has a place, with what has arrived of its answer.

    Attributes:
        queued, last: when it began to wait, and the time of its last tokens, in seconds of `time.monotonic`.
    """

    queued: float = 0.0
    last: float | None = None
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)


class Scheduler:
    """Lets requests wait until they can be decoded, and passes events of the decoding process to them.

    Args:
        queue: requests that may wait besides those that are decoded.

    Attributes:
        places: requests that are received, wait or are decoded; running: those that are decoded, by number.
        has_failed: whether the decoding process has ended by itself, which happens only if it is killed.
        on_failure: called then.
    """

    def __init__(self, process: DecoderProcess, max_requests: int, queue: int, metrics: Metrics) -> None:
        self.process, self._metrics = process, metrics
        self._max_requests, self._limit = max_requests, max_requests + queue
        self._free = asyncio.Semaphore(max_requests)
        self._numbers = count()
        self.places: set[Ticket] = set()
        self.running: dict[int, Ticket] = {}
        self.num_waiting = 0
        self._mean_s = 1.0  # duration of an answer
        self._last_round, self._longest_s = time.monotonic(), 0.0
        self.is_draining = self.has_failed = False
        self.on_failure: Callable[[], object] = lambda: None
        metrics.watch("waiting_requests", "Requests in the queue", lambda: self.num_waiting)
        metrics.watch("running_requests", "Requests that are decoded", lambda: len(self.running))

    @property
    def hung_s(self) -> float:
        """Seconds since the last round if they are so many that the decoder seems to hang; else 0."""
        age = time.monotonic() - self._last_round
        return age if self.running and age > max(HUNG_S, 3 * self._longest_s) else 0.0

    def start(self) -> None:
        """Receives events in the event loop that runs."""
        asyncio.get_running_loop().add_reader(self.process.connection.fileno(), self._receive)

    @contextmanager
    def reserved(self) -> Iterator[Ticket]:
        """Reserves a place for a request, until the block ends or it has been decoded; ApiError if there is none."""
        if self.is_draining or not self.process.is_alive:
            raise stopping()
        if (count := len(self.places)) >= self._limit:
            seconds = self._mean_s * max(1, count - self._max_requests) / self._max_requests
            delay_s = min(MAX_RETRY_S, max(1, round(seconds)))
            message = f"{count} requests are in progress, the most that this server takes; try again later"
            raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="queue_full", retry_s=delay_s)
        ticket = Ticket()
        self.places.add(ticket)
        try:
            yield ticket
        finally:
            self.places.discard(ticket)

    async def decode(self, ticket: Ticket, inputs: Any, sampling: Sampling, **options: Any) -> AsyncGenerator[Emitted | Stats]:
        """Yields new tokens, `Stats` last; ApiError ends the answer early. Closing the generator cancels the request.

        Args:
            inputs: of `Target.prepare`.
            options: of `BatchDecoder.add`.
        """
        ticket.queued = time.monotonic()
        await self._wait()
        number = next(self._numbers)
        if not self.running:
            self._last_round = time.monotonic()
        self.running[number] = ticket
        try:
            # a connection copies arrays, and shares the memory of tensors
            arrays = {key: value.numpy() if isinstance(value, Tensor) else value for key, value in inputs.items()}
            self.process.send("add", number, arrays, sampling, options)
            while not isinstance(event := await ticket.events.get(), Exception):
                yield event
                if isinstance(event, Stats):
                    return
            if isinstance(event, ApiError):
                raise event
            raise invalid(str(event)) if isinstance(event, ValueError) else internal()
        finally:
            if number in self.running:  # the client has left
                self._release(number)
                self.process.send("remove", number)
                self._metrics.ended("cancelled")

    async def _wait(self) -> None:
        if self.is_draining:
            raise stopping()
        self.num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.num_waiting -= 1
        if self.is_draining or self.has_failed:
            self._free.release()  # for the next one that waits
            raise internal() if self.has_failed else stopping()

    async def drain(self, seconds: float) -> None:
        """Refuses requests that wait or arrive, and waits for the end of those that are decoded, which end after `seconds`."""
        self.is_draining = True
        self._free.release()  # wakes those that wait, one after the other
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for _ in range(self._max_requests + 1):
                    await self._free.acquire()
        self._end_all(stopping())

    def _receive(self) -> None:
        try:
            events, now = self.process.connection.recv(), time.monotonic()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self.process.connection.fileno())
            self.has_failed = True
            logger.error("the decoding process has ended, so the server stops; a process is killed if memory runs out")
            self._end_all(internal())
            self.on_failure()
            return
        self._last_round, self._longest_s = now, max(self._longest_s, now - self._last_round if self.running else 0.0)
        for number, event in events:
            if number in self.running:  # else its client has left
                self._pass_on(number, event)

    def _pass_on(self, number: int, event: Event) -> None:
        ticket, now = self.running[number], time.monotonic()
        ticket.events.put_nowait(event)
        if isinstance(event, tuple):
            self._metrics.emitted(len(event[0]), now - (ticket.last or ticket.queued), is_first=ticket.last is None)
            ticket.last = now
            return
        self._release(number)
        if isinstance(event, Stats):
            self._mean_s += SMOOTHING * (now - ticket.queued - self._mean_s)
            self._metrics.answered(event, now - ticket.queued)
        elif not isinstance(event, ValueError):
            self._metrics.ended("failed")

    def _release(self, number: int) -> None:
        self.places.discard(self.running.pop(number))
        self._free.release()

    def _end_all(self, error: ApiError) -> None:
        for number in [*self.running]:
            self._pass_on(number, error)


class Metrics:
    """Counts and times of one server in Prometheus' format; `pid` is that of the decoding process, if it has one.

    What a round has done is counted when its answer ends.
    """

    def __init__(self, model: str = "", pid: int | None = None) -> None:
        self.registry = CollectorRegistry()
        Info("sage_model", "The target", registry=self.registry).info({"name": model})
        ProcessCollector(registry=self.registry)
        if pid is not None:
            ProcessCollector("sage_decoder", lambda: pid, registry=self.registry)
        self.responses = self._counter("responses", "Chat completion requests by status", "status")
        self._ends = self._counter("answers", "Started answers by their end", "end")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts")
        self._generated = self._counter("generated_tokens", "Tokens of answers")
        self._rounds = self._counter("rounds", "Draft-and-verify rounds")
        self._drafted = self._counter("drafted_tokens", "Nodes of verified trees")
        self._accepted = self._counter("accepted_tokens", "Rounds that accepted a drafted token at this depth", "depth")
        self._stages = self._counter("stage_seconds", "Seconds per stage of decoding", "stage")
        self._answer_s = self._histogram("answer_seconds", "From the queue to the end")
        self._first_token_s = self._histogram("first_token_seconds", "From the queue to the first token")
        self._token_s = self._histogram("token_seconds", "From one token to the next, the mean of each round")
        self._prompt_length = self._histogram("prompt_length", "Tokens of a prompt", TOKENS)
        self._answer_length = self._histogram("answer_length", "Tokens of an answer", TOKENS)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"sage_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(f"sage_{name}", text, registry=self.registry, buckets=buckets)

    def watch(self, name: str, text: str, number: Callable[[], int]) -> None:
        """Adds a gauge whose value is that of a function."""
        Gauge(f"sage_{name}", text, registry=self.registry).set_function(number)

    def emitted(self, count: int, seconds: float, is_first: bool) -> None:
        """Counts new tokens of an answer, `seconds` after those before."""
        self._generated.inc(count)
        (self._first_token_s if is_first else self._token_s).observe(seconds if is_first else seconds / count)

    def answered(self, stats: Stats, seconds: float) -> None:
        """Counts a complete answer."""
        self.ended("complete")
        self._prompt.inc(stats.prompt_tokens)
        self._prompt_length.observe(stats.prompt_tokens)
        self._answer_length.observe(stats.new_tokens)
        self._rounds.inc(stats.rounds)
        self._drafted.inc(sum(entry["nodes"] for entry in stats.rounds_log))
        for depth, rounds in Tally(depth for accepted in stats.accepted for depth in range(1, accepted + 1)).items():
            self._accepted.labels(depth).inc(rounds)
        for stage, time_s in stats.time_s.items():
            self._stages.labels(stage).inc(time_s)
        self._answer_s.observe(seconds)

    def ended(self, how: str) -> None:
        """Counts the end of an answer: complete, cancelled or failed."""
        self._ends.labels(how).inc()

"""Requests on their way to the decoding process and back: places, the queue, cancellations, metrics, the end of the server.

Everything runs in the event loop of the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from typing import Any

from sage.decoding.answer import Stats
from sage.decoding.settings import Sampling
from sage.serving.decoding import Decoding, Event
from sage.serving.errors import ApiError, internal, invalid, stopping
from sage.serving.metrics import Metrics

logger = logging.getLogger(__name__)
MAX_RETRY_S = 60
HUNG_S = 30.0  # without a round; or three times the longest one, where rounds take that long
SMOOTHING = 0.2  # weight of the newest answer in the mean duration of answers


@dataclass
class Job:
    """A request in the decoding process, with what has arrived of its answer.

    Attributes:
        place: what `Scheduler.reserved` has returned.
        queued, last: when it began to wait, and the time of its last tokens, in seconds of `time.monotonic`.
    """

    place: object
    queued: float = field(default_factory=time.monotonic)
    last: float | None = None
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)


class Scheduler:
    """Lets requests wait until they can be decoded, and passes events of the decoding process to them.

    Args:
        queue: requests that may wait besides those that are decoded.

    Attributes:
        has_failed: whether the decoding process has ended by itself, which happens only if it is killed.
        on_failure: called then.
    """

    def __init__(self, decoding: Decoding, max_requests: int, queue: int, metrics: Metrics) -> None:
        self.decoding, self._metrics = decoding, metrics
        self._max_requests, self._limit = max_requests, max_requests + queue
        self._places = asyncio.Semaphore(max_requests)
        self._numbers = count()
        self._running: dict[int, Job] = {}
        self._reserved: set[object] = set()
        self.num_waiting = 0
        self._mean_s = 1.0  # duration of an answer
        self._last_round, self._longest_s = time.monotonic(), 0.0
        self.is_draining = self.has_failed = False
        self.on_failure: Callable[[], object] = lambda: None
        metrics.watch(lambda: self.num_waiting, lambda: self.num_running)

    @property
    def num_running(self) -> int:
        """Number of requests that are decoded."""
        return len(self._running)

    @property
    def num_reserved(self) -> int:
        """Number of requests that have a place."""
        return len(self._reserved)

    @property
    def hung_s(self) -> float:
        """Seconds since the last round if they are so many that the decoder seems to hang; else 0."""
        age = time.monotonic() - self._last_round
        return age if self._running and age > max(HUNG_S, 3 * self._longest_s) else 0.0

    def start(self) -> None:
        """Receives events in the event loop that runs."""
        asyncio.get_running_loop().add_reader(self.decoding.fileno(), self._receive)

    @contextmanager
    def reserved(self) -> Iterator[object]:
        """Reserves a place for a request, until the block ends or it has been decoded; ApiError if there is none."""
        if self.is_draining or not self.decoding.is_alive:
            raise stopping()
        if (count := self.num_reserved) >= self._limit:
            seconds = self._mean_s * max(1, count - self._max_requests) / self._max_requests
            delay = str(min(MAX_RETRY_S, max(1, round(seconds))))
            message = f"{count} requests are in progress, the most that this server takes; try again later"
            raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="queue_full", headers={"Retry-After": delay})
        place = object()
        self._reserved.add(place)
        try:
            yield place
        finally:
            self._reserved.discard(place)

    async def decode(self, place: object, inputs: Any, sampling: Sampling) -> AsyncGenerator[list[int] | Stats]:
        """Yields new tokens, `Stats` last; ApiError ends the answer early. Closing the generator cancels the request."""
        job = Job(place)
        await self._wait_for_place()
        number = next(self._numbers)
        if not self._running:
            self._last_round = time.monotonic()
        self._running[number] = job
        try:
            self.decoding.add(number, inputs, sampling)
            while not isinstance(event := await job.events.get(), Exception):
                yield event
                if isinstance(event, Stats):
                    return
            if isinstance(event, ApiError):
                raise event
            raise invalid(str(event)) if isinstance(event, ValueError) else internal()
        finally:
            if number in self._running:  # the client has left
                self._free(number)
                self.decoding.remove(number)
                self._metrics.ended("cancelled")

    async def _wait_for_place(self) -> None:
        if self.is_draining:
            raise stopping()
        self.num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.num_waiting -= 1
        if self.is_draining or self.has_failed:
            self._places.release()  # for the next one that waits
            raise internal() if self.has_failed else stopping()

    async def drain(self, seconds: float) -> None:
        """Refuses requests that wait or arrive, and waits for the end of those that are decoded, which end after `seconds`."""
        self.is_draining = True
        self._places.release()  # wakes those that wait, one after the other
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for _ in range(self._max_requests + 1):
                    await self._places.acquire()
        self._end_all(stopping())

    def _receive(self) -> None:
        try:
            events, now = self.decoding.events(), time.monotonic()
            self._last_round, self._longest_s = now, max(self._longest_s, now - self._last_round if self._running else 0.0)
            for number, event in events:
                if number in self._running:  # else its client has left
                    self._pass_on(number, event)
        except (EOFError, OSError):
            self._fail()

    def _pass_on(self, number: int, event: Event) -> None:
        job = self._running[number]
        job.events.put_nowait(event)
        if isinstance(event, list):
            now = time.monotonic()
            self._metrics.emitted(len(event), now - (job.last or job.queued), is_first=job.last is None)
            job.last = now
            return
        self._free(number)
        if isinstance(event, Stats):
            seconds = time.monotonic() - job.queued
            self._mean_s += SMOOTHING * (seconds - self._mean_s)
            self._metrics.answered(event, seconds)
        elif not isinstance(event, ValueError):
            self._metrics.ended("failed")

    def _free(self, number: int) -> None:
        self._reserved.discard(self._running.pop(number).place)
        self._places.release()

    def _fail(self) -> None:
        """Ends all requests, and the server, after the decoding process has ended."""
        asyncio.get_running_loop().remove_reader(self.decoding.fileno())
        self.has_failed = True
        logger.error("the decoding process has ended, so the server stops; a process is killed if memory runs out")
        self._end_all(internal())
        self.on_failure()

    def _end_all(self, error: ApiError) -> None:
        for number in [*self._running]:
            self._pass_on(number, error)

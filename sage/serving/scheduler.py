"""Requests on their way to the decoding loop and back: places, numbers, cancellations, metrics, the end of the server.

A request reserves a place, is prepared, and is submitted; `Job.emit` receives its tokens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from typing import Any

from sage.decoding.answer import Stats
from sage.decoding.settings import Sampling
from sage.serving.decoding import Decoding
from sage.serving.errors import ApiError, internal, invalid
from sage.serving.loop import Add, Event, Events, Mark, Order, Refused, Remove
from sage.serving.metrics import Metrics

logger = logging.getLogger(__name__)
MAX_RETRY_S = 60
SMOOTHING = 0.2  # weight of the newest answer in the mean duration of answers
Result = list[int] | Stats | ApiError  # new tokens; the end of an answer; an error that ends it


def stopping() -> ApiError:
    """Returns the error for requests that arrive, or still wait, after the signal to stop."""
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping", headers={"Retry-After": "5"})


@dataclass(eq=False)
class Job:
    """A prepared request.

    Attributes:
        emit: receives new tokens, then `Stats` or `ApiError` once; must not block.
        is_running: whether it has a row of the decoder.
    """

    inputs: Any
    sampling: Sampling
    emit: Callable[[Result], None]
    number: int = -1
    submitted: float = field(default_factory=time.monotonic)
    first_token: float = 0.0
    is_running: bool = False


class Scheduler:
    """Passes requests to a decoding loop and its events to them.

    Args:
        queue: requests that may wait besides those that are decoded.

    Attributes:
        has_failed: whether the loop has ended by itself, which happens only if its process is killed.
        on_failure: called then, in a thread.
    """

    def __init__(self, decoding: Decoding, max_requests: int, queue: int, metrics: Metrics) -> None:
        self._decoding, self._metrics = decoding, metrics
        self._max_requests, self._limit = max_requests, max_requests + queue
        self._lock = threading.Lock()
        self._numbers = count()
        self._jobs: dict[int, Job] = {}
        self._num_reserved = 0
        self._mean_s = 1.0  # duration of an answer
        self._is_draining = False
        self._on_drained: Callable[[], object] | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self.has_failed = False
        metrics.watch(lambda: len(self._jobs) - self.num_running, lambda: self.num_running)

    @property
    def is_alive(self) -> bool:
        """Whether the decoding loop runs."""
        return self._decoding.is_alive

    @property
    def is_draining(self) -> bool:
        """Whether the server is stopping."""
        return self._is_draining

    @property
    def num_running(self) -> int:
        """Number of requests that are decoded."""
        return sum(job.is_running for job in list(self._jobs.values()))

    def start(self) -> None:
        """Starts the decoding loop."""
        self._decoding.start(self._receive)

    def reserve(self) -> None:
        """Reserves a place for a request that will be prepared and submitted; `release` frees it. ApiError if there is none."""
        with self._lock:
            if self._is_draining or not self.is_alive:
                raise stopping()
            if self._num_reserved >= self._limit:
                seconds = self._mean_s * max(1, self._num_reserved - self._max_requests) / self._max_requests
                delay = str(min(MAX_RETRY_S, max(1, round(seconds))))
                message = f"{self._num_reserved} requests are in progress, the most that this server takes; try again later"
                raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="queue_full", headers={"Retry-After": delay})
            self._num_reserved += 1

    def release(self) -> None:
        """Frees a place."""
        with self._lock:
            self._num_reserved -= 1

    def submit(self, job: Job) -> None:
        """Appends a request to the queue; ApiError if the server is stopping."""
        with self._lock:
            if self._is_draining or not self.is_alive:
                raise stopping()
            job.number = next(self._numbers)
            self._jobs[job.number] = job
        self._decoding.send(Add(job.number, job.inputs, job.sampling))
        job.inputs = None

    def cancel(self, job: Job) -> None:
        """Ends a request before the next round; nothing is emitted any more. It may have ended already."""
        if self._jobs.pop(job.number, None) is None:
            return
        self._decoding.send(Remove(job.number))
        if job.is_running:
            self._metrics.ended("cancelled")

    def drain(self, on_drained: Callable[[], object]) -> None:
        """Refuses requests that wait or arrive, finishes those that are decoded, and then calls `on_drained` in a thread."""
        self._on_drained = on_drained
        self._is_draining = True  # without the lock: a signal may interrupt the thread that holds it
        self._decoding.send(Order.DRAIN)

    def close(self) -> None:
        """Ends the decoding loop after the round in progress; answers in progress are dropped."""
        self._is_draining = True
        self._decoding.close()

    def _receive(self, events: Events) -> None:
        now = time.monotonic()
        for number, event in events:
            if event is Mark.DRAINED:
                self._report_drained()
            elif event is Mark.ENDED:
                self._fail_all()
            elif (job := self._jobs.get(number)) is not None:  # else its client has left
                self._handle(job, event, now)

    def _handle(self, job: Job, event: Event, now: float) -> None:
        if event is Mark.STARTED:
            job.is_running = True
        elif isinstance(event, list):
            if not job.first_token:
                job.first_token = now
                self._metrics.first_token_s.observe(now - job.submitted)
            job.emit(event)
        elif self._jobs.pop(job.number, None) is not None:
            job.emit(self._result(job, event, now))

    def _result(self, job: Job, event: Event, now: float) -> Result:
        """Returns what a client receives at the end of its request."""
        if isinstance(event, Stats):
            self._mean_s += SMOOTHING * (now - job.submitted - self._mean_s)
            self._metrics.answered(event, now - job.submitted)
            return event
        if isinstance(event, Refused):
            return invalid(event.reason)
        if event is Mark.STOPPED:
            return stopping()
        if job.is_running:
            self._metrics.ended("failed")
        return internal()

    def _report_drained(self) -> None:
        report, self._on_drained = self._on_drained, None
        if report is not None:
            report()

    def _fail_all(self) -> None:
        """Ends all requests after the loop has ended."""
        self.has_failed = not self._is_draining
        for job in list(self._jobs.values()):
            self._handle(job, Mark.FAILED, time.monotonic())
        self._report_drained()
        if self.has_failed:
            logger.error("the decoding process has ended, so the server stops; a process is killed if memory runs out")
            self.on_failure()

"""The decoding thread: requests wait in a queue, join and leave between rounds, and end without touching one another.

The thread owns the decoder; no other thread runs a pass. Other threads reserve a place, submit a prepared request and receive
its tokens through `Job.emit`, which is called in the decoding thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from sage.decoding.answer import Stats
from sage.decoding.batch import BatchRequest
from sage.decoding.decoder import Round
from sage.decoding.settings import Sampling
from sage.serving.decoders import ServedDecoder
from sage.serving.errors import ApiError, internal, invalid
from sage.serving.metrics import Metrics

logger = logging.getLogger(__name__)
MAX_RETRY_S = 60
SMOOTHING = 0.2  # weight of the newest answer in the mean duration of answers
Event = list[int] | Stats | ApiError  # new tokens; the end of an answer; an error that ends it


def stopping() -> ApiError:
    """Returns the error for requests that arrive, or still wait, after the signal to stop."""
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping", headers={"Retry-After": "5"})


@dataclass(eq=False)
class Job:
    """A prepared request.

    Attributes:
        emit: receives new tokens, then `Stats` or `ApiError` once; must not block.
        is_cancelled: whether the client has left.
    """

    inputs: Any
    sampling: Sampling
    emit: Callable[[Event], None]
    is_cancelled: bool = False
    submitted: float = field(default_factory=time.monotonic)
    first_token: float = 0.0


class Scheduler:
    """Runs the decoder in a thread.

    Args:
        new_decoder: creates the decoder, in the thread that uses it, at the start and after a fault of the decoder itself.
        queue: requests that may wait besides those that are decoded.
    """

    def __init__(self, new_decoder: Callable[[], ServedDecoder], max_requests: int, queue: int, metrics: Metrics) -> None:
        self._new_decoder, self._metrics = new_decoder, metrics
        self._max_requests, self._limit = max_requests, max_requests + queue
        self._condition = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: dict[BatchRequest, Job] = {}
        self._num_reserved = 0
        self._mean_s = 1.0  # duration of an answer
        self._is_draining = self._is_closed = False
        self._on_drained: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        metrics.watch(lambda: len(self._waiting), lambda: len(self._running))

    @property
    def is_alive(self) -> bool:
        """Whether the decoding thread runs."""
        return self._thread.is_alive()

    @property
    def is_draining(self) -> bool:
        """Whether the server is stopping."""
        return self._is_draining

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def reserve(self) -> None:
        """Reserves a place for a request that will be prepared and submitted; `release` frees it. ApiError if there is none."""
        with self._condition:
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
        with self._condition:
            self._num_reserved -= 1

    def submit(self, job: Job) -> None:
        """Appends a request to the queue; ApiError if the server is stopping."""
        with self._condition:
            if self._is_draining:
                raise stopping()
            self._waiting.append(job)
            self._condition.notify()

    def cancel(self, job: Job) -> None:
        """Ends a request before the next round; nothing is emitted any more."""
        with self._condition:
            job.is_cancelled = True
            self._condition.notify()

    def drain(self, on_drained: Callable[[], object]) -> None:
        """Refuses requests that wait or arrive, finishes those that are decoded, and calls `on_drained` in the thread."""
        self._on_drained = on_drained
        self._is_draining = True  # without the lock: a signal may interrupt the thread that holds it
        threading.Thread(target=self._notify, name="drain").start()

    def close(self) -> None:
        """Ends the thread after the round in progress; answers in progress are dropped."""
        self._is_draining = self._is_closed = True
        self._notify()
        if self._thread.is_alive():
            self._thread.join()

    def _notify(self) -> None:
        with self._condition:
            self._condition.notify()

    def _run(self) -> None:
        decoder = self._new_decoder()
        while self._wait_for_work():
            try:
                self._join(decoder)
                for request, round_ in decoder.step() if self._running else ():
                    self._handle(decoder, request, round_)
                self._leave(decoder)
            except Exception:
                logger.exception("the decoder failed; its requests end and it starts anew")
                decoder = self._restart()

    def _wait_for_work(self) -> bool:
        """Waits for a request; returns False once the thread is to end."""
        with self._condition:
            while not (self._is_closed or self._waiting or self._running):
                if self._is_draining and self._on_drained is not None:
                    self._on_drained()
                    self._on_drained = None
                self._condition.wait()
            return not self._is_closed

    def _join(self, decoder: ServedDecoder) -> None:
        """Starts the next request, one per round: others wait for one prefill at most."""
        self._leave(decoder)
        with self._condition:
            waiting = [job for job in self._waiting if not job.is_cancelled]
            refused = waiting if self._is_draining else []
            self._waiting = deque([] if refused else waiting)
            can_start = self._waiting and len(self._running) < self._max_requests
            job = self._waiting.popleft() if can_start else None
        for other in refused:
            other.emit(stopping())
        if job is None:
            return
        try:
            self._running[decoder.add(job.inputs, job.sampling)] = job
        except ValueError as error:
            job.emit(invalid(str(error)))
        except Exception:
            logger.exception("a request could not be started")
            job.emit(internal())
        job.inputs = None

    def _leave(self, decoder: ServedDecoder) -> None:
        """Ends the requests whose clients have left."""
        for request in [request for request, job in self._running.items() if job.is_cancelled]:
            self._end(decoder, request)
            self._metrics.ended("cancelled")

    def _handle(self, decoder: ServedDecoder, request: BatchRequest, round_: Round) -> None:
        """Passes on what a request has emitted, and its end."""
        job, now = self._running[request], time.monotonic()
        if request.error is not None:
            logger.error("a request failed", exc_info=request.error)
            self._end(decoder, request)
            self._metrics.ended("failed")
            job.emit(internal())
            return
        if not job.first_token:
            job.first_token = now
            self._metrics.first_token_s.observe(now - job.submitted)
        if round_.tokens:
            job.emit(list(round_.tokens))
        if request.is_over:
            self._end(decoder, request)
            self._mean_s += SMOOTHING * (now - job.submitted - self._mean_s)
            self._metrics.answered(request.generation.stats, now - job.submitted)
            job.emit(request.generation.stats)

    def _end(self, decoder: ServedDecoder, request: BatchRequest) -> None:
        del self._running[request]
        decoder.remove(request)

    def _restart(self) -> ServedDecoder:
        for job in self._running.values():
            job.emit(internal())
            self._metrics.ended("failed")
        self._running.clear()
        return self._new_decoder()

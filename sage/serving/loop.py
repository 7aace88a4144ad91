"""The decoding loop: requests join and leave between rounds, and end without touching one another.

It owns the decoder, and identifies requests by number. Commands arrive in an inbox, events of requests leave through `send`,
all of a round at once. Whether the loop has a thread or a process of its own is decided elsewhere (`decoding.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from queue import SimpleQueue
from typing import Any

from sage.decoding.answer import Stats
from sage.decoding.batch import BatchRequest
from sage.decoding.decoder import Round
from sage.decoding.settings import Sampling
from sage.serving.decoders import ServedDecoder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Add:
    """Appends a request to the queue; `inputs` as of `Target.prepare`."""

    number: int
    inputs: Any
    sampling: Sampling


@dataclass(frozen=True)
class Remove:
    """Ends a request before the next round; it may have ended already."""

    number: int


class Order(Enum):
    """DRAIN: refuse requests that wait, and finish those that are decoded. CLOSE: end after the round in progress."""

    DRAIN = "drain"
    CLOSE = "close"


@dataclass(frozen=True)
class Refused:
    """A request that cannot be decoded, with the reason."""

    reason: str


class Mark(Enum):
    """An event without further content: of a request, or of all (none is left after `Order.DRAIN`, the loop has ended)."""

    STARTED = "started"
    FAILED = "failed"
    STOPPED = "stopped"
    DRAINED = "drained"
    ENDED = "ended"


Command = Add | Remove | Order
Event = list[int] | Stats | Refused | Mark  # new tokens; the end of an answer; others that end a request, but for STARTED
Events = list[tuple[int, Event]]  # with the number of the request, or ALL
ALL = -1


class DecodingLoop:
    """Decodes up to `max_requests` requests; others wait.

    Args:
        new_decoder: creates the decoder, at the start and after a fault of the decoder itself.
    """

    def __init__(
        self,
        new_decoder: Callable[[], ServedDecoder],
        max_requests: int,
        inbox: SimpleQueue[Command],
        send: Callable[[Events], object],
    ) -> None:
        self._new_decoder, self._max_requests, self._inbox, self._send = new_decoder, max_requests, inbox, send
        self._waiting: dict[int, Add] = {}
        self._running: dict[BatchRequest, int] = {}
        self._events: Events = []
        self._is_draining = self._is_closed = False

    def run(self) -> None:
        """Runs until `Order.CLOSE`."""
        self._decoder = self._new_decoder()
        while self._obeys():
            try:
                self._join()
                for request, round_ in self._decoder.step() if self._running else ():
                    self._handle(request, round_)
            except Exception:
                logger.exception("the decoder failed; its requests end and it starts anew")
                self._restart()
            self._flush()

    def _obeys(self) -> bool:
        """Obeys the commands that have arrived, after waiting for one if there is no request; returns False once closed."""
        while not self._is_closed and (not self._inbox.empty() or not (self._waiting or self._running)):
            command = self._inbox.get()
            if isinstance(command, Add):
                self._waiting[command.number] = command
            elif isinstance(command, Remove):
                self._remove(command.number)
            else:
                self._is_draining = True
                self._is_closed = command is Order.CLOSE
            if self._is_draining:
                self._refuse_waiting()
        return not self._is_closed

    def _remove(self, number: int) -> None:
        self._waiting.pop(number, None)
        for request in [request for request, own in self._running.items() if own == number]:
            self._end(request)

    def _refuse_waiting(self) -> None:
        self._events += [(number, Mark.STOPPED) for number in self._waiting]
        self._waiting.clear()
        self._flush()

    def _join(self) -> None:
        """Starts the next request, one per round: others wait for one prefill at most."""
        if not self._waiting or len(self._running) >= self._max_requests:
            return
        number = next(iter(self._waiting))
        one = self._waiting.pop(number)
        try:
            self._running[self._decoder.add(one.inputs, one.sampling)] = number
            self._events.append((number, Mark.STARTED))
        except ValueError as error:
            self._events.append((number, Refused(str(error))))
        except Exception:
            logger.exception("a request could not be started")
            self._events.append((number, Mark.FAILED))

    def _handle(self, request: BatchRequest, round_: Round) -> None:
        """Passes on what a request has emitted, and its end."""
        number = self._running[request]
        if request.error is not None:
            logger.error("a request failed", exc_info=request.error)
            self._end(request)
            self._events.append((number, Mark.FAILED))
            return
        if round_.tokens:
            self._events.append((number, list(round_.tokens)))
        if request.is_over:
            self._end(request)
            self._events.append((number, request.generation.stats))

    def _end(self, request: BatchRequest) -> None:
        del self._running[request]
        self._decoder.remove(request)

    def _restart(self) -> None:
        self._events += [(number, Mark.FAILED) for number in self._running.values()]
        self._running.clear()
        self._decoder = self._new_decoder()

    def _flush(self) -> None:
        if self._is_draining and not self._running:
            self._events.append((ALL, Mark.DRAINED))
        if self._events:
            self._send(self._events)
            self._events = []

"""The decoding process: requests join and leave between rounds, and end without touching one another.

Commands and events are tuples on a connection, and name a request by its number:

    from the server   ("add", number, arrays, sampling), ("remove", number); closing the connection ends the process
    to the server     [(number, event), ..] once per round: new tokens; or the end of the request, which is `Stats`,
                      `ValueError` for one that cannot be decoded, or `RuntimeError` for a fault, which is logged
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from sage.decoding.answer import Stats
from sage.decoding.batch import BatchRequest
from sage.decoding.decoder import Round
from sage.decoding.settings import Sampling
from sage.runtime.timing import frozen_heap
from sage.serving.decoders import Plan

logger = logging.getLogger(__name__)
Event = list[int] | Stats | Exception


def decode_in_process(connection: Connection, load: Callable[..., Plan], args: tuple[Any, ...]) -> None:
    """The process. Signals are the server's to obey."""
    from sage.commands.cli import plain_warnings

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    plain_warnings()
    decode(connection, load, args)


def decode(connection: Connection, load: Callable[..., Plan], args: tuple[Any, ...]) -> None:
    """Loads, sends `max_context` and `end_token_ids` of the plan, or the user's mistake as text; then decodes."""
    with connection, suppress(EOFError, OSError):  # the server has closed the connection, or is gone
        try:
            plan = load(*args)
        except (ValueError, OSError) as error:
            connection.send(" ".join(str(error).split()))
            return
        connection.send((plan.max_context, plan.end_token_ids))
        with frozen_heap():
            DecodingLoop(plan, connection).run()


def as_arrays(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns inputs with arrays instead of tensors: a connection copies arrays, and shares the memory of tensors."""
    return {key: value.numpy() if isinstance(value, Tensor) else value for key, value in inputs.items()}


def as_tensors(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the inputs of `as_arrays`."""
    return {key: torch.from_numpy(value) if hasattr(value, "__array__") else value for key, value in arrays.items()}


class DecodingLoop:
    """Obeys commands between rounds, until the connection is closed."""

    def __init__(self, plan: Plan, connection: Connection) -> None:
        self._plan, self._connection = plan, connection
        self._decoder = plan.new_decoder()
        self._running: dict[BatchRequest, int] = {}
        self._events: list[tuple[int, Event]] = []

    def run(self) -> None:
        """Runs until the connection is closed; EOFError or OSError then."""
        while True:
            while self._connection.poll(None if not (self._running or self._events) else 0):
                self._obey(*self._connection.recv())
            try:
                for request, round_ in self._decoder.step() if self._running else ():
                    self._handle(request, round_)
            except Exception:
                logger.exception("the decoder failed; its requests end and it starts anew")
                self._restart()
            if self._events:
                self._connection.send(self._events)
                self._events = []

    def _obey(self, command: str, number: int, *arguments: Any) -> None:
        if command == "add":
            self._add(number, *arguments)
        else:
            for request in [request for request, other in self._running.items() if other == number]:  # it may have ended
                self._end(request)

    def _add(self, number: int, arrays: Mapping[str, Any], sampling: Sampling) -> None:
        """Starts a request; the decoder reads its prompt in parts, so that others do not wait for all of it."""
        try:
            request = self._decoder.add(as_tensors(arrays), self._plan.policy, sampling=sampling)
            self._running[request] = number
        except ValueError as error:
            self._events.append((number, ValueError(str(error))))
        except Exception:
            logger.exception("a request could not be started")
            self._events.append((number, RuntimeError()))

    def _handle(self, request: BatchRequest, round_: Round) -> None:
        """Passes on what a request has emitted, and its end."""
        number = self._running[request]
        if round_.tokens:
            self._events.append((number, list(round_.tokens)))
        if request.is_over:
            self._end(request)
            if request.error is not None:
                logger.error("a request failed", exc_info=request.error)
            self._events.append((number, request.generation.stats if request.error is None else RuntimeError()))

    def _end(self, request: BatchRequest) -> None:
        del self._running[request]
        self._decoder.remove(request)

    def _restart(self) -> None:
        self._events += [(number, RuntimeError()) for number in self._running.values()]
        self._running.clear()
        self._decoder = self._plan.new_decoder()

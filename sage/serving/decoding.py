"""Where the decoding loop runs: in a thread, or in a process of its own.

`sage-serve` decodes in a process of its own. A compiled pass keeps Python's lock, so in one process the server would neither
receive nor send during a pass, and each pass would wait for the server; and every thread with parallel work of torch has worker
threads of its own, which stop waiting actively for each other where there are more of them than processors.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from sage.serving.decoders import ServedDecoder
from sage.serving.loop import ALL, Add, Command, DecodingLoop, Events, Mark, Order

STOP_S = 10.0  # seconds that the process has to end


@dataclass(frozen=True)
class Plan:
    """What is to be decoded, once it has been loaded and tried.

    Attributes:
        new_decoder: as of `DecodingLoop`.
        max_context: tokens of a prompt and its answer.
        end_token_ids: ids that end an answer.
    """

    new_decoder: Callable[[], ServedDecoder]
    max_requests: int
    max_context: int
    end_token_ids: tuple[int, ...]


class Decoding(ABC):
    """A decoding loop, as the server sees it."""

    @abstractmethod
    def start(self, receive: Callable[[Events], object]) -> None:
        """Starts the loop; `receive` is called with its events, in a thread of this process."""

    @abstractmethod
    def send(self, command: Command) -> None:
        """Sends a command; does not wait, and may be called in a signal handler."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the loop runs."""

    @abstractmethod
    def close(self) -> None:
        """Ends the loop after the round in progress; answers in progress are dropped."""


class DecodingThread(Decoding):
    """The loop in a thread of this process."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, receive: Callable[[Events], object]) -> None:
        loop = DecodingLoop(self._plan.new_decoder, self._plan.max_requests, self._inbox, receive)
        self._thread = threading.Thread(target=loop.run, name="decoding", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        self.send(Order.CLOSE)
        if self._thread is not None:
            self._thread.join()


class DecodingProcess(Decoding):
    """The loop in a process of its own, which is started at once and loads what it decodes.

    Args:
        load: loads it; a function of a module, called in the process with `args`.
    """

    def __init__(self, load: Callable[..., Plan], *args: Any) -> None:
        context = get_context("spawn")
        self._connection, far_end = context.Pipe()
        self._process = context.Process(target=_work, args=(far_end, load, args), name="decoding", daemon=True)
        self._process.start()
        far_end.close()
        self._outbox: SimpleQueue[Command] = SimpleQueue()

    def wait(self) -> tuple[int, tuple[int, ...]]:
        """Waits until everything is loaded; returns `max_context` and `end_token_ids` of the plan.

        Raises:
            ValueError: the user's mistake that `load` has found, or a process that has ended.
        """
        try:
            found = self._connection.recv()
        except EOFError as error:
            self._process.join()
            raise ValueError(f"the decoding process has ended with exit code {self._process.exitcode}") from error
        if isinstance(found, str):
            raise ValueError(found)
        max_context, end_token_ids = found
        return max_context, end_token_ids

    def start(self, receive: Callable[[Events], object]) -> None:
        threading.Thread(target=self._write, name="to decoding", daemon=True).start()
        threading.Thread(target=self._read, args=(receive,), name="from decoding", daemon=True).start()

    def send(self, command: Command) -> None:
        self._outbox.put(command)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        self.send(Order.CLOSE)
        self._process.join(STOP_S)
        self.kill()

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.join()

    def _write(self) -> None:
        try:
            while True:
                command = self._outbox.get()
                self._connection.send(as_arrays(command))
                if command is Order.CLOSE:
                    return
        except OSError:  # the process has ended, which `_read` reports
            return

    def _read(self, receive: Callable[[Events], object]) -> None:
        try:
            while True:
                receive(self._connection.recv())
        except (EOFError, OSError):
            receive([(ALL, Mark.ENDED)])


def as_arrays(command: Command) -> Command:
    """Returns a command with arrays instead of tensors: a connection copies arrays, and shares the memory of tensors."""
    if not isinstance(command, Add):
        return command
    arrays = {key: value.numpy() if isinstance(value, Tensor) else value for key, value in command.inputs.items()}
    return replace(command, inputs=arrays)


def as_tensors(command: Command) -> Command:
    """Returns the command of `as_arrays`."""
    return replace(command, inputs=_tensors(command.inputs)) if isinstance(command, Add) else command


def _tensors(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {key: torch.from_numpy(value) if hasattr(value, "__array__") else value for key, value in arrays.items()}


def _work(connection: Connection, load: Callable[..., Plan], args: tuple[Any, ...]) -> None:
    """The process: loads, then decodes until the server closes it or is gone. Signals are the server's to obey."""
    from sage.commands.cli import plain_warnings
    from sage.runtime.timing import frozen_heap

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    plain_warnings()
    inbox: SimpleQueue[Command] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), name="commands", daemon=True).start()
    try:
        plan = load(*args)
    except (ValueError, OSError) as error:
        connection.send(" ".join(str(error).split()))
        return
    connection.send((plan.max_context, plan.end_token_ids))
    with frozen_heap():
        DecodingLoop(plan.new_decoder, plan.max_requests, inbox, connection.send).run()


def _receive(connection: Connection, inbox: SimpleQueue[Command]) -> None:
    try:
        while True:
            inbox.put(as_tensors(connection.recv()))
    except (EOFError, OSError):
        sys.stderr.flush()
        os._exit(1)  # the server is gone, so nothing waits for an answer

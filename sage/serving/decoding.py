"""The decoding process as the server sees it.

A compiled pass keeps Python's lock, so in one process the server would neither receive nor send during a pass, and each pass
would wait for the server; and every thread with parallel work of torch has worker threads of its own, which stop waiting
actively for each other where there are more of them than processors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any

from sage.decoding.settings import Sampling
from sage.serving.decoders import Plan
from sage.serving.worker import Event, as_arrays, decode, decode_in_process

STOP_S = 10.0  # seconds that the process has to end


class Decoding:
    """The worker (`sage.serving.worker`) at the other end of a connection; it starts at once and loads what it decodes.

    Args:
        load: loads it; a function of a module, called in the process with `args`.
        in_process: False: in a thread of this process instead, for a target that is loaded already.
    """

    def __init__(self, load: Callable[..., Plan], *args: Any, in_process: bool = True) -> None:
        context = get_context("spawn")
        self._connection, far_end = context.Pipe()
        self._worker: BaseProcess | threading.Thread
        if in_process:
            self._worker = context.Process(target=decode_in_process, args=(far_end, load, args), name="decoding", daemon=True)
            self._worker.start()
            far_end.close()
        else:
            self._worker = threading.Thread(target=decode, args=(far_end, load, args), name="decoding", daemon=True)
            self._worker.start()
        self._sender = ThreadPoolExecutor(1, "to decoding")  # sending many pixels takes time

    def wait(self) -> tuple[int, tuple[int, ...]]:
        """Waits until everything is loaded; returns `max_context` and `end_token_ids` of the plan.

        Raises:
            ValueError: the user's mistake that `load` has found, or a process that has ended.
        """
        try:
            found = self._connection.recv()
        except EOFError as error:
            self._worker.join()
            code = getattr(self._worker, "exitcode", None)
            raise ValueError(f"the decoding process has ended with exit code {code}") from error
        if isinstance(found, str):
            raise ValueError(found)
        max_context, end_token_ids = found
        return max_context, end_token_ids

    @property
    def is_alive(self) -> bool:
        """Whether the worker runs."""
        return self._worker.is_alive()

    def fileno(self) -> int:
        """Returns the descriptor that is readable once there are events."""
        return self._connection.fileno()

    def events(self) -> list[tuple[int, Event]]:
        """Returns the events that the worker has sent last; EOFError or OSError if it has ended."""
        found: list[tuple[int, Event]] = self._connection.recv()
        return found

    def add(self, number: int, inputs: Any, sampling: Sampling) -> None:
        """Starts a request; `inputs` as of `Target.prepare`."""
        self._send("add", number, as_arrays(inputs), sampling)

    def remove(self, number: int) -> None:
        """Ends a request before the next round; it may have ended already."""
        self._send("remove", number)

    def close(self) -> None:
        """Ends the worker after the round in progress; answers in progress are dropped."""
        self._sender.submit(self._connection.close)
        self._sender.shutdown(wait=False)
        self._worker.join(STOP_S)
        self.kill()

    def kill(self) -> None:
        """Ends the process at once."""
        if isinstance(self._worker, BaseProcess):
            self._worker.kill()
            self._worker.join()

    def _send(self, *command: Any) -> None:
        self._sender.submit(self._write, command)

    def _write(self, command: tuple[Any, ...]) -> None:
        with suppress(OSError):  # the worker has ended, which `events` reports
            self._connection.send(command)

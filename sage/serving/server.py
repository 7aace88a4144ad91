"""The HTTP server: uvicorn on a socket that is bound before anything is loaded, and signals that let answers finish.

Connections on which nothing happens end, so that neither their descriptors nor places of requests are lost.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sage.commands.cli import EXIT_INTERRUPTED
from sage.serving.app import new_app
from sage.serving.service import Service

IDLE_S = 30  # seconds that a client may leave a connection without a whole request, or an answer unread
MAX_CONNECTIONS, BACKLOG, OTHER_FILES = 1024, 32, 64
GRACE_S = 10  # seconds that clients have to read the end of their answers after a signal
HEADER_BYTES = 1 << 16


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket bound to an address; ValueError if that is not possible."""
    with ExitStack() as on_error:
        try:
            addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, (address, _, *scope) = addresses[0]
            bound = on_error.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((address, port, *scope))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"--host {host} --port {port}: {reason}; give another port, or 0 for a free one") from error
        on_error.pop_all()
        return bound


def address_of(bound: socket.socket) -> str:
    """Returns the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def max_connections() -> int:
    """Raises the limit of descriptors as far as possible; returns how many of them connections may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + BACKLOG + OTHER_FILES
    limit = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    with suppress(ValueError):  # it is higher already
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, resource.getrlimit(resource.RLIMIT_NOFILE)[0]), most))
    return max(1, limit - BACKLOG - OTHER_FILES)


class Connection(H11Protocol):
    """A connection, which ends within `IDLE_S` without a whole request, or with an answer that is not read.

    Where there are too many, one that waits for a request makes room for the new one.
    """

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts to wait for a request."""
        if len(self.connections) + 1 >= (self.limit_concurrency or 0):
            others = (other for other in self.connections if isinstance(other, Connection) and other.is_idle)
            if idle := next((other for other in others if not other.transport.is_closing()), None):
                idle.transport.abort()
        super().connection_made(transport)
        self._check(None)

    def _check(self, before: object) -> None:
        """Ends the connection if it waits for its client, as it did at the last check."""
        now = (self.cycle, self.transport.get_write_buffer_size()) if self.is_idle or self.flow.write_paused else None
        if now is not None and now == before:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.loop.call_later(IDLE_S / 2, self._check, now)


class Server(uvicorn.Server):
    """Serves until a signal. The first one lets the answers in progress finish, the second ends the process.

    Args:
        on_ready: called once requests are accepted.
    """

    def __init__(self, service: Service, on_ready: Callable[[], object]) -> None:
        super().__init__(
            uvicorn.Config(
                new_app(service),
                loop="asyncio",
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                limit_concurrency=max_connections(),
                h11_max_incomplete_event_size=HEADER_BYTES,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._service, self._on_ready = service, on_ready
        service.scheduler.on_failure = self.stop
        self._is_stopping = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until `stop`."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens the socket."""
        self._service.scheduler.start()
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops accepting requests at the first signal, and everything at the second."""

        async def stop_after_answers() -> None:
            await self._service.scheduler.drain(self._service.limits.drain_seconds)
            self.stop()

        if not self._is_stopping:
            self._is_stopping = True
            asyncio.run_coroutine_threadsafe(stop_after_answers(), self._loop)
        else:
            print("stopped; answers in progress are lost", file=sys.stderr, flush=True)
            os._exit(EXIT_INTERRUPTED)

    def stop(self) -> None:
        """Ends `run` once the responses in progress are sent."""
        self.should_exit = True


@contextmanager
def running(service: Service) -> Iterator[tuple[Server, str]]:
    """Runs a service in a thread, on a free port of this machine; yields the server and its URL."""
    is_ready = threading.Event()
    with bind("127.0.0.1", 0) as bound:
        server = Server(service, is_ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            is_ready.wait()
            yield server, address_of(bound)
        finally:
            server.stop()
            thread.join()
            service.close()

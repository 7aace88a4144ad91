"""Streams and events of the pretend accelerator: what one stream has written, another may read after waiting for an event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Event:
    """The number of operators that a stream had run."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.time = stream, stream.time


class Stream:
    """Runs operators in order. `seen` has the times of other streams up to which this one has waited for them."""

    def __init__(self, device: Any = None) -> None:
        self.time = 0
        self.seen: dict[Stream, int] = {}

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.seen[event.stream] = max(event.time, self.seen.get(event.stream, 0))


class Streams:
    """The streams of a process. A tensor that another stream than the default one has written knows when: `tensor.written`.

    Attributes:
        kept: number of tensors whose memory was kept for another stream.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.current = self.default = Stream()
        self.kept = 0

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def keep(self, tensor: Any, stream: Stream) -> None:
        self.kept += tensor.written is not None and tensor.written.stream is not stream

    def write(self, results: Sequence[Any]) -> None:
        """Marks the results of an operator on the current stream."""
        if self.current is not self.default:
            self.current.time += 1
            for tensor in results:
                tensor.written = Event(self.current)

    def check(self, operands: Sequence[Any]) -> None:
        """Refuses operands that another stream has written and the current one has not waited for."""
        for event in (tensor.written for tensor in operands if tensor.written is not None):
            if event.stream is not self.current and self.current.seen.get(event.stream, 0) < event.time:
                raise RuntimeError("a tensor is read before the event that ends its copy")

"""Micro-batches on their way to the device: prepared in the loader's thread, copied while the previous one is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sage import Target

PIXELS = "pixel_values"  # prefix of the inputs that hold pixels; others, such as the seconds per grid, keep their dtype


@dataclass(frozen=True)
class Staging:
    """Adds rope positions, converts pixels to `dtype`, and for a GPU copies all tensors to pinned memory.

    Models convert pixels to their own dtype first, so that nothing is lost as long as `dtype` is not narrower than theirs. A
    copy from pinned memory overlaps with computation.

    Attributes:
        device: of the target.
        dtype: of target and draft, the wider one.
    """

    target: Target
    device: torch.device
    dtype: torch.dtype

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        placed = self.target.family.with_positions(self.target.model, batch)
        staged = {key: value.to(self.dtype) if key.startswith(PIXELS) else value for key, value in placed.items()}
        if self.device.type == "cpu":
            return staged
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread; pinning would create a context on another GPU
        return {key: value.pin_memory() if isinstance(value, Tensor) else value for key, value in staged.items()}


class DeviceCopies:
    """Copies the micro-batches of a step to the device of this rank, each on a stream of its own while the one before is used.

    Between two steps, the host waits for the device (gradients are checked), so that the first copy of a step overlaps with
    nothing; neither do copies from memory that is not pinned. On a CPU, micro-batches are used as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None if self._module is None else self._module.Stream(device)

    def ahead(self, batches: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields each micro-batch on the device; the copy of the next one is issued before."""
        if self._stream is None:
            yield from batches
            return
        copies = map(self._issue, batches)
        current = next(copies, None)
        while current is not None:
            following = next(copies, None)
            yield self._received(*current)
            current = following

    def _issue(self, batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Starts the copy of a micro-batch; returns it and the event that ends the copy."""
        with self._module.stream(self._stream):
            copied = {
                key: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
                for key, value in batch.items()
            }
            return copied, self._stream.record_event()

    def _received(self, batch: dict[str, Any], copied: Any) -> dict[str, Any]:
        """Makes the current stream wait for a copy, and its memory be kept until that stream has used it."""
        current = self._module.current_stream(self.device)
        current.wait_event(copied)
        for value in batch.values():
            if isinstance(value, Tensor):
                value.record_stream(current)
        return batch

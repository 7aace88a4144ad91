"""Prepares a micro-batch for its copy to the device, in the loader's thread, while the device works on the previous one."""

from __future__ import annotations

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

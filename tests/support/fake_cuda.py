"""A stand-in for `torch.cuda` without a GPU: records the calls that select devices, streams and attention backends."""

from __future__ import annotations

import pytest
import torch


class FakeCuda:
    """Pretends that there are `num_gpus` GPUs; their tensors stay on the CPU.

    Attributes:
        calls: (function, argument) in the order of the calls.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_gpus: int = 4) -> None:
        self.calls: list[tuple[str, object]] = []
        for name in ("synchronize", "set_device"):
            monkeypatch.setattr(torch.cuda, name, lambda device=None, name=name: self.calls.append((name, device)))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: ("stream", device))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self)
        monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: self.calls.append(("enable_cudnn_sdp", on)))
        empty = torch.empty

        def empty_on_cpu(*size: object, device: object = None, **options: object) -> torch.Tensor:
            return empty(*size, device="cpu" if "cuda" in str(device) else device, **options)

        monkeypatch.setattr(torch, "empty", empty_on_cpu)

    def record(self, stream: object = None) -> None:
        """Records an event."""
        self.calls.append(("record", stream))

    def synchronize(self) -> None:
        """Waits for an event."""
        self.calls.append(("wait for an event", None))

    def elapsed_time(self, other: object) -> float:
        """Returns one millisecond."""
        return 1.0

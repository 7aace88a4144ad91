"""The pretend accelerator itself: what it refuses, what it counts, and that models train on it as on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.accelerator import DEVICE, DEVICES, Kind, Traffic, on_device
from torch import Tensor, nn

INFERENCE_MODE = torch.inference_mode  # the accelerator replaces the name, not what was decorated with it before


def on_vacc() -> Tensor:
    return on_device(torch.arange(3.0))


@pytest.mark.parametrize(
    "mix",
    [
        lambda ours: ours + torch.zeros(3),
        lambda ours: ours + torch.zeros(3, device=DEVICES[1]),
        lambda ours: torch.zeros(3)[ours.long()],
        lambda ours: nn.functional.embedding(torch.tensor([0]), ours[:, None]),
    ],
)
def test_mixed_devices_are_refused(traffic: Traffic, mix: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        mix(on_vacc())


def counts(traffic: Traffic) -> dict[str, int]:
    return {kind.name: traffic.count(kind) for kind in Kind if traffic.count(kind)}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda ours: ours.tolist(), {"SYNCHRONIZATION": 1}),
        (lambda ours: bool((ours > 1).any()), {"SYNCHRONIZATION": 1}),
        (lambda ours: torch.zeros(3).copy_(ours), {"SYNCHRONIZATION": 1}),
        (lambda ours: ours.nonzero(), {"SYNCHRONIZATION": 1}),
        (lambda ours: ours[ours > 1], {"SYNCHRONIZATION": 1}),
        (lambda ours: ours.to(DEVICES[1]), {"BETWEEN_DEVICES": 1}),
        (lambda ours: torch.zeros(3).to(DEVICE, non_blocking=True), {"BLOCKING_UPLOAD": 1}),
        (lambda ours: torch.zeros(3).pin_memory().to(DEVICE), {"BLOCKING_UPLOAD": 1}),
        (lambda ours: torch.zeros(3, pin_memory=True)[1:].to(DEVICE, non_blocking=True), {"UPLOAD": 1}),
        (lambda ours: torch.tensor([1, 2], device=DEVICE), {"BLOCKING_UPLOAD": 1}),
        (lambda ours: ours.masked_fill_(ours > 1, 0.0).cumsum(0).argmax(), {}),
        (lambda ours: ours.to(DEVICE).to(torch.float64), {}),
    ],
)
def test_synchronizations_and_copies_are_counted(
    traffic: Traffic, call: Callable[[Tensor], object], expected: dict[str, int]
) -> None:
    with INFERENCE_MODE():
        ours = on_vacc()
        traffic.reset()
        call(ours)
    assert counts(traffic) == expected
    assert {line.split(":")[0] for _, line in traffic.lines} <= {"tests/device/test_accelerator.py"}

"""The pretend accelerator itself: what it refuses, what it counts, and that models train on it as on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.accelerator import DEVICE, DEVICES, Kind, Traffic, on_device, on_host
from torch import Tensor, nn

INFERENCE_MODE = torch.inference_mode  # the accelerator replaces the name, not what was decorated with it before


def on_vacc() -> Tensor:
    return on_device(torch.arange(3.0))


def test_tensors_claim_their_device(traffic: Traffic) -> None:
    made = {
        "factory": torch.zeros(3, device=DEVICES[1]),
        "like": torch.zeros_like(torch.zeros(3, device=DEVICES[1])),
        "numbers": torch.tensor([1, 2], device=DEVICES[1]),
        "moved": torch.zeros(3).to(DEVICES[1]),
        "result": torch.zeros(3, device=DEVICES[1]) + 1,
        "view": torch.zeros(3, device=DEVICES[1])[1:],
    }
    with torch.device(DEVICES[1]):
        made |= {"context": torch.ones(2), "module": nn.Linear(2, 2).weight}
    with torch.inference_mode():
        made |= {"inference": torch.zeros(3).to(DEVICES[1]) * 2}
    assert {name: tensor.device for name, tensor in made.items()} == dict.fromkeys(made, DEVICES[1])
    assert torch.zeros(3).device.type == "cpu" and on_vacc().cpu().device.type == "cpu"


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


def test_scalars_and_host_indices_may_be_mixed(traffic: Traffic) -> None:
    ours = on_vacc()
    traffic.reset()
    assert (ours + torch.tensor(1.0)).device == DEVICE and not traffic.lines
    assert on_host(ours[torch.tensor([2, 0])]).tolist() == [2.0, 0.0]
    assert traffic.blocking_uploads == 1, "a host index is copied to the device"


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


def test_an_optimizer_step_equals_that_of_the_cpu(traffic: Traffic) -> None:
    device = DEVICES[1]
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 3)).double() for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    ours.to(device)
    inputs, labels = torch.randn(5, 4).double(), torch.tensor([0, 1, 2, 0, 1])
    for model, where in ((ours, device), (theirs, torch.device("cpu"))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        nn.functional.cross_entropy(model(inputs.to(where)), labels.to(where)).backward()
        assert {parameter.grad.device for parameter in model.parameters() if parameter.grad is not None} == {where}
        optimizer.step()
    found, expected = on_host(dict(ours.named_parameters())), dict(theirs.named_parameters())
    for name in expected:  # the optimizer chooses another implementation by device, with another order of operations
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-15)


def test_nothing_is_left_behind() -> None:
    if hasattr(torch, "vacc"):
        assert not torch.vacc.is_available() and not torch.accelerator.is_available()
    assert torch.zeros(2).pin_memory.__name__ == "pin_memory"

"""Copies between host and device: contents, and how often they wait."""

from __future__ import annotations

import pytest
import torch
from support.accelerator import DEVICE, Kind, Traffic, on_device, on_host

from sage.runtime.host_tensors import (
    CPU,
    TokenStagingBuffer,
    cached_index,
    long_tensor,
    read_together,
    take_runs,
    upload_together,
)

TOGETHER = (
    torch.arange(6).view(2, 3),
    torch.empty(0, 2),
    torch.tensor([[0.5, float("inf")]])[:, 1],
    torch.rand(3, 4)[:, 1],
    torch.tensor([True, False]),
)


@pytest.mark.parametrize("device", [CPU, DEVICE])
def test_read_together(traffic: Traffic, device: torch.device) -> None:
    first, *more = on_device(TOGETHER, device)
    traffic.reset()
    one, none, *found, last = read_together(first, None, *more, None)
    found = [one, *found]
    assert none is None and last is None
    assert all(
        torch.equal(one, expected) and one.dtype == expected.dtype for one, expected in zip(found, TOGETHER, strict=True)
    )
    assert traffic.lines.total() == traffic.synchronizations == (device != CPU)


@pytest.mark.parametrize("device", [CPU, DEVICE])
def test_upload_together(traffic: Traffic, device: torch.device) -> None:
    found = upload_together(device, *TOGETHER)
    assert {one.device for one in found} == {device}
    assert traffic.lines.total() == traffic.count(Kind.UPLOAD) == (device != CPU)
    assert all(torch.equal(on_host(one), expected) for one, expected in zip(found, TOGETHER, strict=True))


def test_uploads_do_not_wait(traffic: Traffic) -> None:
    buffer = TokenStagingBuffer(DEVICE)
    staged = [buffer.stage([1, 2, 3]), buffer.stage([4, 5, 6]), long_tensor([7], DEVICE), cached_index((8, 9), DEVICE)]
    assert cached_index((8, 9), DEVICE) is staged[-1]
    assert traffic.lines.total() == traffic.count(Kind.UPLOAD) == 4
    assert [on_host(one).tolist() for one in staged] == [[1, 2, 3], [4, 5, 6], [7], [8, 9]]


def test_runs_are_taken_without_a_copy_of_the_index(traffic: Traffic) -> None:
    values = on_device(torch.arange(10))
    traffic.reset()
    taken = take_runs(values, [1, 2, 5, 9])
    assert not traffic.lines and on_host(taken).tolist() == [1, 2, 5, 9]

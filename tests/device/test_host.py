"""Numbers of the host as tensors, and the check of a device, on the simulated device."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.accelerator import DEVICE, Kind, Traffic, on_device, on_host
from support.fake_cuda import FakeCuda
from support.messages import exit_code
from support.pass_helpers import call_again, capture_with

import sage
from sage.commands import device_check
from sage.commands.device_check import attention_used, synchronizations_per_round
from sage.commands.generate import main
from sage.runtime import captured
from sage.runtime.executors import executor_of
from sage.runtime.host_tensors import (
    CPU,
    TokenStagingBuffer,
    cached_index,
    long_tensor,
    read_together,
    take_runs,
    upload_together,
)
from sage.runtime.modes import PassMode
from sage.runtime.timing import TimedCall

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


@pytest.mark.parametrize("index", [[0], [3], [0, 1, 2], [4, 5, 8], [0, 2, 4, 6], [1, 2, 5, 6, 7, 9]])
def test_runs_are_taken_without_a_copy_of_the_index(traffic: Traffic, index: list[int]) -> None:
    values = on_device(torch.arange(10))
    traffic.reset()
    taken = take_runs(values, index)
    assert not traffic.lines and on_host(taken).tolist() == index


BACKENDS = torch.nn.attention.SDPBackend


@pytest.mark.slow
def test_report_of_the_cpu(target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(device_check, "REPEATS", 2)
    assert exit_code(main, "--check-device", "--target", target, "--device", "cpu") == 0
    rows = {line[:20].strip(): line[20:] for line in capsys.readouterr().out.splitlines()}
    assert rows["device"].startswith("cpu, ") and rows["dtype"] == "float32"
    for part in ("vision", "prefill", "tree"):
        assert rows[f"{part} attention"].startswith("flash_attention_for_cpu x ")
    assert rows["tree attention"].endswith(" x 2")  # layers
    assert rows["copy bandwidth"].endswith(" GB/s") and rows["target pass"].endswith("x")
    assert rows["synchronizations"] == "n/a" and rows["passes"] == "eager"


def test_operators_of_a_captured_pass_are_counted_once(tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    capture_with(monkeypatch, call_again)
    monkeypatch.setattr(captured, "why_masked", lambda *_: "a reason")
    call = device_check._tree_pass(tiny_qwen, device_check.AsEager(executor_of(PassMode.captured)))
    assert attention_used(call, CPU) == f"flash_attention_for_cpu x {tiny_qwen.num_layers}"


def test_attention_is_named_by_the_operators_that_run() -> None:
    states = torch.zeros(1, 2, 4, 8)

    def attend(is_math: bool) -> None:
        with torch.no_grad(), torch.nn.attention.sdpa_kernel([BACKENDS.MATH] if is_math else [*BACKENDS.__members__.values()]):
            torch.nn.functional.scaled_dot_product_attention(states, states, states)

    assert attention_used(TimedCall(lambda: attend(False)), CPU) == "flash_attention_for_cpu x 1"
    assert attention_used(TimedCall(lambda: attend(True)), CPU) == "no fused operator"


def test_synchronizations_of_rounds_without_the_prefill(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: fake_cuda.calls.append(("mode", mode)))

    def rounds() -> Iterator[None]:
        yield  # the prefill
        for _ in range(2):
            for _ in range(3):
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
            yield

    generation = SimpleNamespace(rounds=rounds, stats=SimpleNamespace(rounds=2))
    assert synchronizations_per_round(generation, torch.device("cuda:0")) == 3.0
    assert fake_cuda.calls == [("mode", "warn"), ("mode", "default")]
    assert synchronizations_per_round(generation, CPU) is None

"""Ranks on GPUs, tested without one: which GPU a rank takes, time limits, threads, and presets on a machine with one GPU."""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fake_cuda import FakeCuda
from support.messages import refused

from train.config.hydra_app import compose
from train.config.run_length import RunLength
from train.config.schema import Config, ConfigError, Device, LaunchConfig
from train.job import loop
from train.job.build import set_threads
from train.job.rank import run_rank
from train.launch.cluster_env import set_torch_defaults
from train.launch.launcher import check_devices
from train.launch.ranks import NCCL_TIMEOUT_S, Ranks, check_own_gpu, pick_device, process_group
from train.state.resume import TrainState

GPU = torch.device("cuda", 0)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch, num_gpus=1)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of the process groups that are created."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: found.update({backend: options}))
    monkeypatch.setattr(dist, "new_group", lambda backend, **options: found.update({backend: options}) or "own group")
    monkeypatch.setattr("train.launch.ranks._join", lambda *_: None)
    monkeypatch.setattr("train.launch.ranks.check_own_gpu", lambda ranks: None)
    return found


def test_a_rank_that_sees_one_gpu_takes_it(one_gpu: FakeCuda, groups: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `srun --gpus-per-task=1`; DeepSpeed takes LOCAL_RANK for the index of the GPU."""
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    with process_group("auto", 60) as ranks:
        assert (ranks.rank, ranks.device, os.environ["LOCAL_RANK"]) == (5, GPU, "0")
    assert ("set_device", 0) in one_gpu.calls


def test_a_rank_that_sees_every_gpu_takes_that_of_its_local_rank(fake_cuda: FakeCuda) -> None:
    assert pick_device("cuda", 3) == torch.device("cuda", 3)
    with refused("rank 4 of this machine", "only 4 GPU(s)", error=ConfigError):
        pick_device("cuda", 4)


def test_ranks_that_share_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = ["GPU-a", "GPU-b", "GPU-a"]
    monkeypatch.setattr(Ranks, "gather", lambda _, item: uuids)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-a"))
    with refused("launch.gpus", "ranks 0 and 2 share the GPU GPU-a", "--gpus-per-task=1", error=ConfigError):
        check_own_gpu(Ranks(1, 3, GPU))
    uuids[2] = "GPU-c"
    check_own_gpu(Ranks(1, 3, GPU))


def test_nccl_has_a_shorter_time_limit_than_waiting_for_rank_0(one_gpu: FakeCuda, groups: dict[str, Any]) -> None:
    with process_group("cuda", 7200) as ranks:
        assert ranks.group == "own group"
    assert groups["cpu:gloo,cuda:nccl"]["timeout"] == timedelta(seconds=NCCL_TIMEOUT_S)
    assert groups["gloo"]["timeout"] == timedelta(seconds=7200)


def test_more_ranks_than_gpus_are_refused_with_the_key_that_was_given(one_gpu: FakeCuda) -> None:
    for key in ("gpus", "ranks"):
        with refused(f"launch.{key}=2", "1 GPU(s)", "launch.device=cpu", error=ConfigError):
            check_devices(LaunchConfig(**{key: 2}), 2)  # type: ignore[arg-type]


def test_gpus_of_a_machine_without_any_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before eight ranks load a target on its CPU; `launch.ranks`, or `launch.device=cpu`, says that this is meant."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused("launch.gpus=8", "no GPU", "launch.ranks=8", error=ConfigError):
        check_devices(LaunchConfig(gpus=8), 8)
    with refused("launch.device=cuda", "no GPU", error=ConfigError):
        check_devices(LaunchConfig(ranks=2, device=Device.cuda), 2)
    for meant in (LaunchConfig(ranks=8), LaunchConfig(gpus=8, device=Device.cpu)):
        check_devices(meant, 8)


@pytest.mark.parametrize(
    ("given", "launcher", "device", "expected"),
    [
        (None, None, "cpu", 4),
        ("1", "torchrun", "cuda", 4),
        ("1", "torchrun", "cpu", None),
        ("2", "torchrun", "cuda", None),
        ("1", None, "cuda", None),
    ],
)
def test_ranks_on_gpus_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, given: str | None, launcher: str | None, device: str, expected: int | None
) -> None:
    """None: OMP_NUM_THREADS stands. torchrun sets it to 1 where it is missing."""
    values = {"OMP_NUM_THREADS": given, "TORCHELASTIC_RUN_ID": launcher, "LOCAL_WORLD_SIZE": "2"}
    for name, value in values.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    set_threads(compose("config", [], Config), Ranks(0, 2, torch.device(device)))
    assert chosen == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("given", "alloc", "compilers"),
    [
        ({}, "expandable_segments:True", "4"),
        ({"LOCAL_WORLD_SIZE": "8", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, None, "2"),
        ({"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native", "1"),
    ],
)
def test_a_run_sets_what_torch_reads_at_its_import(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], alloc: str | None, compilers: str
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    set_torch_defaults()
    assert (os.environ.get("PYTORCH_ALLOC_CONF"), os.environ["TORCHINDUCTOR_COMPILE_THREADS"]) == (alloc, compilers)
    assert "import torch" in inspect.getsource(run_rank).split("set_torch_defaults()")[1]


def test_steps_of_a_deterministic_run_alone_are_restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation may use operations without a deterministic algorithm; it does not change the weights."""
    seen = list[bool]()
    monkeypatch.setattr(loop, "train_step", lambda *_: seen.append(torch.are_deterministic_algorithms_enabled()) or (0.0, 0.0))
    for is_on in ("true", "false"):
        config = compose("config", [f"train.deterministic={is_on}", "train.max_steps=2"], Config)
        run: Any = SimpleNamespace(config=config, state=TrainState(), length=RunLength(2), figures={})
        loop.take_step(run, [])
        assert not torch.are_deterministic_algorithms_enabled()
    assert seen == [True, False]

"""Ranks on two nodes without a shared disk, on GPUs (tested without one: which GPU, time limits, threads), and in a sweep."""

import json
import os
import subprocess
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.fake_cuda import FakeCuda
from support.fork_server import ForkServer
from support.messages import check_message, refused
from support.train_helpers import command, environment, metrics, sage_train, srun_variables

import sage
from data_prep.build import prompts as held_out_prompts
from train.config.hydra_app import compose
from train.config.schema import Config, ConfigError, Device, LaunchConfig
from train.job.build import set_threads
from train.launch.cluster_env import set_torch_defaults
from train.launch.launcher import check_devices
from train.launch.ranks import NCCL_TIMEOUT_S, Ranks, blind_ranks, check_own_gpu, check_same, pick_device, process_group
from train.validation.prompts import PromptSet
from train.validation.validate import ReportInfo, validate

VALIDATED = ["train.validate_on=all", "train.validate_every=2", "decode.num_prompts=2", "decode.policies=[sage]"]
SETTINGS = ["train.micro_batch_size=1", "launch.device=cpu", "deepspeed=zero1", "objective.feature_noise=0.1", *VALIDATED]


def run_nodes(commands: ForkServer, target: Path, folders: list[Path], step_id: int, *overrides: str) -> list[tuple[int, str]]:
    """Runs one rank per folder as srun does on nodes with a disk each; returns exit codes and stderr in their order."""
    processes = []
    for rank, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        slurm = srun_variables(rank) | {"SLURM_LOCALID": "0", "SLURM_NODEID": str(rank), "SLURM_STEP_ID": str(step_id)}
        variables = environment() | slurm | {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
        arguments = [*command(target, Path("run")), *SETTINGS, "data.cache_dir=cache", *overrides]
        words = [*commands.command("train.cli.train"), *arguments]
        options: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(words, env=variables, cwd=folder, **options))
    errors = [process.communicate()[1] for process in processes]
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_nodes_without_a_shared_disk_train_validate_and_resume(target: Path, tmp_path: Path, commands: ForkServer) -> None:
    """Two steps and a third after resuming are, bit for bit, the three steps of two ranks on one disk."""
    nodes, shared = [tmp_path / "a", tmp_path / "b"], tmp_path / "shared"
    first = run_nodes(commands, target, nodes, 1, "train.max_steps=2")
    assert [code for code, _ in first] == [0, 0], first
    assert "run.dir" in first[0][1] and "not shared with" in first[0][1]
    report = json.loads((tmp_path / "a/run/validation/step_00000002/report.json").read_text())
    assert report["policies"]["sage"]["total"] == 2
    assert sorted(path.name for path in (tmp_path / "b/run").iterdir()) == [".draft.copy.part", "config.yaml"]
    again = run_nodes(commands, target, nodes, 2, "train.max_steps=3", "run.resume=true")
    assert [code for code, _ in again] == [0, 0] and "resumed from" in again[0][1], again
    straight = run_nodes(commands, target, [shared, shared], 3, "train.max_steps=3")
    assert [code for code, _ in straight] == [0, 0], straight
    one, other = (load_file(home / "run/state/step_00000003/weight.safetensors") for home in (nodes[0], shared))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [line["step"] for line in metrics(nodes[0] / "run")] == [1, 2, 3]
    turned = run_nodes(commands, target, nodes[::-1], 4, "train.max_steps=4", "run.resume=true")
    lines = [line for _, text in turned for line in text.splitlines() if "error: " in line]
    assert sorted(code for code, _ in turned) in ([1, 2], [2, 2]) and len(lines) == 1, turned
    check_message(lines[0], "run.resume: step 3 is saved on", str(nodes[0] / "run/state"), "--node-rank=0")


@pytest.fixture
def other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the collective operation of two ranks: the other one, on `b`, sees no file and has `other`."""
    monkeypatch.setattr(Ranks, "gather", lambda _, item: [item, (False, "b") if item and item[0] is True else ("b", "other")])
    monkeypatch.setattr(Ranks, "broadcast", lambda _, item: item)


def test_what_nodes_do_not_share_is_named_with_its_host(other_host: None, tmp_path: Path) -> None:
    ranks = Ranks(0, 2, torch.device("cpu"))
    assert blind_ranks(ranks, tmp_path / "new") == {1: "b"}
    assert not list((tmp_path / "new").iterdir())
    check_same(ranks, "data.path", "other")
    with refused("data.path: other for rank 1 on b, but 12 examples for rank 0 on ", error=ConfigError):
        check_same(ranks, "data.path", "12 examples")


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
    ],
)
def test_ranks_on_gpus_share_the_cores(monkeypatch, given, launcher, device, expected):
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
def test_a_run_sets_what_torch_reads_at_its_import(monkeypatch, given, alloc, compilers):
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    set_torch_defaults()
    assert (os.environ.get("PYTORCH_ALLOC_CONF"), os.environ["TORCHINDUCTOR_COMPILE_THREADS"]) == (alloc, compilers)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_sweep_of_two_ranks_each_ends_in_one_comparison(tmp_path, target, commands, alone):
    """What two ranks measure together is, count for count, what one process measures alone."""
    ranks = ["launch.ranks=2", "launch.device=cpu", "train.micro_batch_size=1"]
    arguments = command(target, tmp_path / "sweep", "train.max_steps=2", *ranks)
    own = ["decode.policies=[autoregressive,static]", "decode.num_prompts=3", "train.validate_on=all", "launch.device=cpu"]
    done = sage_train(commands, "-m", *arguments, *own, "optim.lr=1e-3,4e-3", "data.cache_dir=cache", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    runs = sorted(path.parent for path in (tmp_path / "sweep").glob("*/draft_best"))
    assert [run.name for run in runs] == ["optim.lr_0.001", "optim.lr_0.004"]
    assert len({(run / "draft" / "model.safetensors").read_bytes() for run in runs}) == 2
    compared = json.loads((tmp_path / "sweep" / "compare.json").read_text())
    assert compared["changed"] == ["optim.lr"]
    assert [run["steps"] for run in compared["runs"]] == [2] * 2 and (tmp_path / "sweep" / "compare.png").is_file()
    assert all(run["policies"]["static"]["total"] == 3 for run in compared["runs"])
    assert done.stdout.endswith(f"comparison: {tmp_path / 'sweep' / 'compare.md'}\n")
    merged = json.loads((runs[0] / "validation" / "step_00000002" / "report.json").read_text())
    config = compose("config", [*command(target, runs[0]), *own], Config)
    loaded, prompts = sage.load_target(target), held_out_prompts(config.data, "validation", 3)
    draft, info = sage.load_draft(runs[0] / "draft", loaded), ReportInfo(run_dir=tmp_path / "alone", step=2)
    alone_report: Any = validate(config.decode, loaded, draft, PromptSet(loaded, config.decode, prompts), info)
    assert merged["prompts"] == alone_report["prompts"] == 3
    for name in ("autoregressive", "static"):
        for count in ("tokens_per_target_pass", "mean_accepted_draft", "match", "total", "acceptance_by_depth"):
            assert merged["policies"][name][count] == alone_report["policies"][name][count], (name, count)

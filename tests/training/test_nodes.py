"""Two nodes without a shared disk: training, validation on all ranks, resuming, and what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.fork_server import ForkServer
from support.messages import check_message, refused
from support.train_helpers import command, environment, metrics, srun_variables

from train.config.schema import ConfigError
from train.launch.nodes import blind_ranks, check_same
from train.launch.ranks import Ranks

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
    errors = [process.communicate(timeout=120)[1] for process in processes]
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


@pytest.mark.slow
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

"""Two ranks against one: every ZeRO stage with a complete and a sharded target, and runs with a changed number of ranks.

All jobs run in the same two processes, started with srun's variables (see rank_process.py).
"""

import contextlib
import copy
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.fork_server import ForkServer
from support.train_helpers import (
    ROOT,
    command,
    configured,
    draft_weights,
    environment,
    single_process,
    srun_variables,
    train_quickly,
)

import sage
from checkpoints.run_folder import read_metrics
from train.config.schema import Config
from train.distill.teacher import count_supervised
from train.engine.sharded_teacher import gathered_ahead
from train.job.build import building
from train.launch.cluster_env import RENDEZVOUS_PORTS
from train.launch.ranks import process_group
from train.state.resume import rng_state, set_rng_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PROCESS = str(ROOT / "tests/support/rank_process.py")
STAGES = (0, 1, 2, 3)
WHOLE = (0, 3)  # stages that also run with a complete and with a sharded target; other runs have stages 1 and 2
ports = iter(random.Random(os.getpid()).sample(RENDEZVOUS_PORTS, 100))
LENGTH = ["train.max_steps=4", "objective.feature_noise=0"]
MUON = ["optim=muon"]
ONE_BF16_STEP = ["target.dtype=bf16", "train.max_steps=1", "train.save_every=1", "optim.grad_clip=0", *LENGTH[1:]]
MUON_IN_BF16 = [*ONE_BF16_STEP, *MUON, "train.max_steps=2"]
BUDGET = ["train.micro_batch_size=4", "train.micro_batch_tokens=130"]  # 1, 2 or 3 examples, other numbers in other steps
WHERE = ["launch.device=cpu", "data.cache=examples"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, target: Path, commands: ForkServer) -> Path:
    """A folder of runs: `one_*` by this process, the others by two ranks."""
    home = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch, single_process(patch):
        patch.delenv("SLURM_STEP_ID", raising=False)
        assert train_quickly(config(target, home / "one_2")) == 0
        assert train_quickly(config(target, home / "one_4", *LENGTH)) == 0
        assert train_quickly(config(target, home / "one_muon", *LENGTH, *MUON)) == 0
        shutil.copytree(home / "one_2", home / "to_two")
        run_two_ranks(commands, home, target)
        shutil.copytree(home / "complete_3", home / "from_two")
        assert train_quickly(config(target, home / "from_two", *LENGTH, "run.resume=true", "deepspeed=zero1")) == 0
        assert train_quickly(config(target, home / "muon_from_two", *LENGTH, *MUON, "run.resume=true")) == 0
    return home


def config(target: Path, run: Path, *overrides: str) -> Config:
    return configured(target, run, *WHERE, *overrides)


def run_two_ranks(commands: ForkServer, home: Path, target: Path) -> None:
    jobs = [job(home, target, f"complete_{stage}", f"deepspeed=zero{stage}") for stage in WHOLE]
    jobs += [job(home, target, f"sharded_{n}", f"deepspeed=zero{n}", "deepspeed.shard_target=true") for n in WHOLE]
    jobs[-1]["is_validated"] = True
    jobs[-1]["arguments"].append("decode.baselines=[hf_generate]")  # not measured by default if the target is sharded
    jobs.append(job(home, target, "budget_2", "deepspeed=zero2", *BUDGET))
    jobs += [job(home, target, f"bf16_{stage}", f"deepspeed=zero{stage}", *ONE_BF16_STEP) for stage in STAGES]
    jobs.append(job(home, target, "muon_1", "deepspeed=zero1", *LENGTH, *MUON))
    jobs.append(job(home, target, "muon_bf16_two", "deepspeed=zero1", *MUON_IN_BF16))
    jobs.append(job(home, target, "muon_from_two", "deepspeed=zero2", *LENGTH, *MUON) | {"stop": 2})
    jobs.append(job(home, target, "to_two", "deepspeed=zero2", "run.resume=true", "deepspeed.shard_target=true", *LENGTH))
    (home / "jobs.json").write_text(json.dumps(jobs))
    errors = [home / f"errors_{rank}.txt" for rank in range(2)]
    processes = [start_rank(commands, home, rank, errors[rank]) for rank in range(2)]
    while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
        time.sleep(0.1)  # each has a time limit of its own
    for process in processes:
        process.kill()  # the other one after a failure
    assert [process.wait() for process in processes] == [0, 0], "\n\n".join(file.read_text() for file in errors)


def start_rank(commands: ForkServer, home: Path, rank: int, errors: Path) -> subprocess.Popen[bytes]:
    with errors.open("w") as stderr:
        return subprocess.Popen(
            [*commands.command(PROCESS), "jobs", home / "jobs.json", home / f"notes_{rank}.json"],
            env=environment() | srun_variables(rank),
            stderr=stderr,
        )


def job(home: Path, target: Path, name: str, *overrides: str) -> dict[str, Any]:
    arguments = [*command(target, home / name), *WHERE, "train.micro_batch_size=1", *overrides]
    return {"name": name, "arguments": arguments, "port": free_port(), "stop": 0, "is_validated": False}


def free_port() -> int:
    """A free port outside the range of ephemeral ports."""
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port
    raise AssertionError("no port is free")


def assert_same_run(one: Path, other: Path) -> None:
    """The order of sums differs, so features agree to about 1e-6 (see test_run for the effect on a step of Adam); a
    wrong factor would move every weight by entire steps of 1e-3."""
    torch.testing.assert_close(draft_weights(one), draft_weights(other), rtol=0, atol=5e-6)
    for left_line, right_line in zip(*(read_metrics(run / "metrics.jsonl") for run in (one, other)), strict=True):
        assert left_line["tokens"] == right_line["tokens"]
        for name in ("loss", "loss_ce", "loss_feature", "grad_norm"):
            assert left_line[name] == pytest.approx(right_line[name], rel=1e-4), name


@pytest.mark.parametrize("run", [*(f"complete_{stage}" for stage in WHOLE), "budget_2"])
def test_two_ranks_give_the_weights_of_one(home: Path, run: str) -> None:
    """Same global batch, 1 rank x 2 x 2 against 2 ranks x 1 x 2, and against micro-batches by a budget of tokens."""
    assert_same_run(home / "one_2", home / run)


def test_muon_updates_parts_of_matrices_in_bf16(home: Path, target: Path) -> None:
    """The float32 weights after two steps of one rank and of two, whose parts end within a matrix; it has no gradient in the
    first step.
    """
    one = home / "muon_bf16_one"
    assert train_quickly(config(target, one, "train.micro_batch_size=1", *MUON_IN_BF16)) == 0
    weights = [load_file(run / "state" / "step_00000002" / "weight.safetensors") for run in (one, home / "muon_bf16_two")]
    torch.testing.assert_close(*weights, rtol=0, atol=5e-6)


@pytest.mark.parametrize("run", ["muon_1", "muon_from_two"])
def test_muon_updates_whole_matrices_on_two_ranks(home: Path, run: str) -> None:
    """Parts of matrices under ZeRO-1, and 2 ranks under ZeRO-2 followed by 1 without ZeRO."""
    assert_same_run(home / "one_muon", home / run)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(draft_weights(home / "one_muon"), draft_weights(home / "one_4"), rtol=0, atol=5e-6)


def test_a_sharded_target_gives_the_same_run_bit_for_bit(home: Path) -> None:
    for stage in WHOLE:
        complete, sharded = (draft_weights(home / f"{kind}_{stage}") for kind in ("complete", "sharded"))
        torch.testing.assert_close(complete, sharded, rtol=0, atol=0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_holds_its_part_of_a_sharded_target(home: Path, rank: int) -> None:
    """Norms and biases (below 1%) are complete; after a pass no layer stays gathered."""
    seen_by_rank = json.loads((home / f"notes_{rank}.json").read_text())
    assert (seen_by_rank["ranks"], seen_by_rank["rank"]) == (2, rank)  # from srun's variables
    assert set(seen_by_rank["targets"]) == {"sharded_0", "sharded_3", "to_two"}
    for seen in seen_by_rank["targets"].values():
        assert seen["is_equal"]  # rank 0 ran an image, rank 1 text alone
        assert 0.5 <= seen["own"] / seen["all"] < 0.51
        assert seen["live"] / seen["all"] < 0.01
        assert seen["is_tied"]


def test_layers_are_gathered_within_a_node(commands: ForkServer, tmp_path: Path, target: Path) -> None:
    """Two ranks on each of two simulated nodes: the features of a complete target, gathered within the node by default."""
    arguments, port = tmp_path / "arguments.json", str(free_port())
    arguments.write_text(json.dumps(command(target, tmp_path / "run", *WHERE, "deepspeed.shard_target=true")))
    torchrun = environment() | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [*commands.command(PROCESS), "nodes", arguments, tmp_path / f"seen_{rank}.json"],
            env=torchrun | {"RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
        )
        for rank in range(4)
    ]
    assert [process.wait() for process in processes] == [0] * 4
    for rank in range(4):
        seen = json.loads((tmp_path / f"seen_{rank}.json").read_text())
        assert all(found["is_equal"] and found["per_node"] == 2 for found in seen.values())
        assert all(found["ahead"] == [True] for found in seen.values()), "a layer is gathered while the one before it runs"
        assert seen["world"]["groups"] == [[0, 1, 2, 3]] and seen["auto"]["groups"] == [[0, 1] if rank < 2 else [2, 3]]
        assert 0.25 <= seen["world"]["own"] / seen["world"]["all"] < 0.27  # norms and biases are complete
        assert 0.5 <= seen["auto"]["own"] / seen["auto"]["all"] < 0.52


def test_a_whole_layer_is_gathered_ahead_and_no_more() -> None:
    layers = torch.nn.ModuleList([torch.nn.Linear(3, 4), torch.nn.Linear(5, 4, bias=False)])
    assert gathered_ahead(layers) == {"stage3_prefetch_bucket_size": 20, "stage3_max_live_parameters": 40}


def test_rank_0_decodes_with_a_sharded_target(home: Path) -> None:
    report = json.loads((home / "sharded_3" / "validation" / "step_00000002" / "report.json").read_text())
    assert report["policies"]["sage"]["match"] == report["policies"]["sage"]["total"] == 1
    assert "hf_generate" in report["baselines"]


@pytest.fixture(scope="module")
def micro_gradients(home: Path, target: Path) -> dict[str, torch.Tensor]:
    """The float64 sum of the bf16 gradients of four micro-batches."""
    one = config(target, home / "reference", "train.micro_batch_size=1", *ONE_BF16_STEP)
    generators = rng_state(torch.device("cpu"))
    with process_group("cpu", 60) as ranks, building(one, ranks) as run:
        student = copy.deepcopy(run.engine.student)
        trained = {name: p for name, p in student.draft.named_parameters() if p.requires_grad}
        sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trained.items()}
        batches = next(iter(run.loader))
        count = sum(int(count_supervised(batch["loss_mask"])) for batch in batches)
        for batch in batches:
            loss = student(run.teacher(batch), run.teacher.lm_head)[0] / count
            for total, gradient in zip(sums.values(), torch.autograd.grad(loss, list(trained.values())), strict=True):
                assert gradient.dtype == torch.bfloat16
                total += gradient
    set_rng_state(generators, torch.device("cpu"))
    return sums


def accumulated(run: Path) -> dict[str, torch.Tensor]:
    """The gradient of the first step, from Adam's first moment, exp_avg = (1 - beta1) gradient."""
    moments = load_file(run / "state" / "step_00000001" / "exp_avg.safetensors")
    return {name: value.double() / (1 - 0.9) for name, value in moments.items()}


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_gradients_are_summed_in_float32(home, target, micro_gradients, stage):
    """1 rank x 4 and 2 ranks x 2 micro-batches. A sum in bf16 has an error of 0.3% after four terms, and of 1% after forty."""
    run = home / f"bf16_one_{stage}"
    assert train_quickly(config(target, run, "train.micro_batch_size=1", f"deepspeed=zero{stage}", *ONE_BF16_STEP)) == 0
    for found in (accumulated(run), accumulated(home / f"bf16_{stage}")):
        assert found.keys() == micro_gradients.keys()
        for name, expected in micro_gradients.items():
            error, size = (found[name] - expected).norm(), expected.norm()
            assert error <= 1e-6 * size, (name, float(error / size))


@pytest.mark.parametrize("run", ["from_two", "to_two"])
def test_a_run_resumes_with_another_number_of_ranks(home: Path, run: str) -> None:
    """2 ranks under ZeRO-3, then 1 under ZeRO-1; 1 without ZeRO, then 2 under ZeRO-2 with a sharded target."""
    assert_same_run(home / "one_4", home / run)


def test_negative_control_a_run_without_its_moments_is_another_run(home: Path) -> None:
    for kind in ("exp_avg", "exp_avg_sq"):
        saved = load_file(home / "from_two" / "state" / "step_00000004" / f"{kind}.safetensors")
        assert any(bool(value.any()) for value in saved.values())
    with pytest.raises(AssertionError):
        assert_same_run(home / "one_2", home / "from_two")


def test_a_draft_saved_under_zero_3_loads_without_deepspeed(home: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No import of `sage` needs it either: `test_imports_are_light`."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.setitem(sys.modules, name, None)
    draft = sage.load_draft(home / "complete_3" / "draft", sage.load_target(target, dtype=torch.float32))
    saved = draft_weights(home / "complete_3")
    assert saved and all(torch.equal(draft.state_dict()[name], value) for name, value in saved.items())
    assert os.environ.get("RANK") is None

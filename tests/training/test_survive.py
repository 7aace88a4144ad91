"""A run that is killed or whose disk is full loses nothing that was saved."""

import random
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.fork_server import ForkServer
from support.messages import check_message, refused
from support.train_helpers import command, environment, train_quickly
from torch import nn

from checkpoints.run_folder import read_metrics
from checkpoints.store import SaveFailed, StateStore, read_tensors, write_tensors
from sage.commands.cli import report
from train.config.hydra_app import compose
from train.config.schema import Config
from train.engine.engine import Engine
from train.engine.optimizers import KINDS
from train.launch.ranks import process_group
from train.state.resume import rng_state, set_rng_state

pytestmark = pytest.mark.slow

# One thread, in this process as in others: sums of several threads differ in their last bits.
SETTINGS = ("deepspeed=zero2", "launch.device=cpu", "launch.threads=1", "objective.feature_noise=0.1", "train.save_every=1")

# Killed after half of the second file of the third state.
KILLED = """
import os, signal, sys
import safetensors.torch as tensors
save_complete, count = tensors.save_file, 0
def save_file(values, path, metadata=None):
    global count
    count += 1
    save_complete(values, path, metadata=metadata)
    if count == 10:
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
tensors.save_file = save_file
from train.cli.train import main
sys.argv[0] = "sage-train"
main()
"""


@pytest.fixture(autouse=True)
def restored_threads(alone: None) -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def configure(target: Path, run: Path, *overrides: str) -> Config:
    return compose("config", [*command(target, run), *SETTINGS, *overrides], Config)


def steps(run: Path) -> list[int]:
    return StateStore(run / "state").steps()


def test_a_run_killed_during_a_save_resumes_bit_for_bit(target: Path, tmp_path: Path, commands: ForkServer) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    (tmp_path / "killed.py").write_text(KILLED)
    done = subprocess.run(
        [*commands.command(f"{tmp_path}/killed.py"), *command(target, killed), *SETTINGS, "train.max_steps=5"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    check_message(done.stderr.splitlines()[-1], f"error: {killed}", "SIGKILL", "out of memory?", f"--resume {killed}")
    assert steps(killed) == [1, 2] and (killed / "state" / ".step_00000003.part").is_dir()
    assert train_quickly(configure(target, killed, "train.max_steps=5", "run.resume=true")) == 0
    assert train_quickly(configure(target, straight, "train.max_steps=5")) == 0
    for kind in KINDS:
        one, other = (load_file(run / "state" / "step_00000005" / f"{kind}.safetensors") for run in (straight, killed))
        assert one and all(torch.equal(one[name], other[name]) for name in one), kind
    assert [line["step"] for line in read_metrics(killed / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert not [path for path in killed.rglob(".*") if path.suffix in (".part", ".old")]


def test_a_full_disk_ends_in_one_line_and_the_run_resumes_later(target, tmp_path, monkeypatch, capsys):
    """The size of files is limited, so that the operating system fails as with a full disk."""
    run, begin, limits = tmp_path / "run", StateStore.begin, resource.getrlimit(resource.RLIMIT_FSIZE)

    def begin_on_a_full_disk(self: StateStore, step: int) -> Path:
        if step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        return begin(self, step)

    with ExitStack() as restored, monkeypatch.context() as patch:
        restored.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        patch.setattr(StateStore, "begin", begin_on_a_full_disk)
        with refused("step 2", "File too large", "step 1", error=SaveFailed) as caught:
            train_quickly(configure(target, run))
    assert report(caught.value) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {caught.value}"
    assert steps(run) == [1] and not list((run / "state").glob(".*"))
    assert train_quickly(configure(target, run, "run.resume=true")) == 0
    assert steps(run) == [1, 2]


class Toy(nn.Module):
    """Sizes that two or three ranks do not divide, a buffer, and a weight that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.draft = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5))
        self.draft[2].bias.requires_grad_(False)
        self.draft.register_buffer("map", torch.arange(3))

    def forward(self, inputs: torch.Tensor, _: Any) -> torch.Tensor:
        return self.draft(inputs).square().sum()


@pytest.mark.parametrize(("precision", "clip"), [("fp32", 0.0), ("bf16", 1.0), ("bf16", 0.0)])
def test_every_stage_resumes_bit_for_bit_and_from_every_other(target, tmp_path, precision, clip):
    """4 steps = 2 + 2 from the state of each stage. With one rank a stage only changes the sum of the gradient's norm, so the
    state of another stage is exact without clipping, and equal up to rounding with clipping."""
    ends: dict[tuple[int, int | None], dict[str, torch.Tensor]] = {}
    options = [f"target.dtype={precision}", "train.global_batch_size=1", "train.micro_batch_size=1", f"optim.grad_clip={clip}"]
    configs = [configure(target, tmp_path / "run", f"deepspeed=zero{stage}", *options) for stage in range(4)]

    def steps_of(stage: int, count: int, first: int, load: Path | None, save: Path | None) -> dict[str, torch.Tensor]:
        with process_group("cpu", 60) as ranks:
            engine = Engine(Toy(), configs[stage], ranks, 1)  # type: ignore[arg-type]
            if load is not None:
                with torch.no_grad():
                    engine.draft.map.zero_()
                engine.load(load)
            for number in range(first, first + count):
                torch.manual_seed(number)
                inputs = torch.randn(4, 7, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
                engine.backward(engine(inputs, None).float())  # type: ignore[arg-type]
                engine.step(1e-2)
            if save is not None:
                save.mkdir()
                engine.save(save)
            found = engine.draft_state()
            engine.close()
        return found

    for stage in range(4):
        ends[stage, None] = steps_of(stage, 4, 0, None, None)
        steps_of(stage, 2, 0, None, tmp_path / f"at_2_{stage}")
    for stage, other in [(0, 0), (1, 1), (2, 2), (3, 3), (0, 3), (3, 1), (1, 2), (2, 0)]:
        ends[stage, other] = steps_of(stage, 2, 2, tmp_path / f"at_2_{other}", None)
        for name, value in ends[stage, None].items():
            rounding = 1e-7 if clip and stage != other else 0.0
            assert (value - ends[stage, other][name]).abs().max() <= rounding, (stage, other, name)
    moved = ends[0, None]["0.weight"] - Toy().draft[0].weight.detach()
    assert float(moved.abs().mean()) > 0.01  # negative control: steps were taken


def test_generators_are_restored_from_plain_tensors(tmp_path: Path) -> None:
    random.gauss(0, 1)  # keeps its second value
    np.random.standard_normal()
    write_tensors(tmp_path / "rng.safetensors", rng_state(torch.device("cpu")))

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), np.random.standard_normal(), float(torch.rand(()))]

    expected = draw()
    set_rng_state(read_tensors(tmp_path / "rng.safetensors"), torch.device("cpu"))
    assert draw() == expected
    (tmp_path / "rng.safetensors").write_bytes(b"cos\nsystem\n")  # the beginning of a pickle
    with refused("rng.safetensors"):
        read_tensors(tmp_path / "rng.safetensors")

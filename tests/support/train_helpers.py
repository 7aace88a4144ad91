"""A random pocket target on disk, command lines that train on it in seconds, and a validation that decodes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.run_folder import read_metrics
from data_prep.pocket import architecture
from train.state.resume import rng_state, set_rng_state

if TYPE_CHECKING:
    from support.fork_server import ForkServer

    from train.config.schema import Config
    from train.launch.ranks import Ranks
    from train.plan.estimate import LaunchPlan

ROOT = Path(__file__).parents[2]
VALIDATE = "train.validation.in_loop.validate"
Validate = Callable[..., dict[str, Any] | None]
SMALL = [
    "data=pocket",
    "data.num_examples=12",
    "data.cache=rows",
    "train.epochs=null",
    "train.max_steps=2",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "train.log_every=1",
    "optim.lr=1e-3",
    "decode.policies=[autoregressive,sage]",
    "decode.num_prompts=1",
    "decode.max_new_tokens=4",
    "decode.warmup=0",
    "decode.traces=0",
]


def policy_figures(tokens: float, **more: Any) -> dict[str, Any]:
    counts = {"tokens_per_target_pass": tokens, "mean_accepted_draft": tokens - 1, "match": 4, "total": 4, "first_gaps": []}
    return counts | {"tokens_per_s": 50.0, "speedup": 1.75, "speedup_end_to_end": 1.5, "time_s": {}} | more


def quick_report(**figures: float) -> dict[str, Any]:
    same = {"prompts": 1, "repeats": 1, "dtype": "float32", "device": "cpu", "temperature": 0.0, "path": "nowhere"}
    rest = {"baselines": {}, "failed_baselines": {}, "fastest_baseline": None}
    shape = {"nodes_per_round": 1.0, "draft_steps_per_round": 1.0}
    return {"policies": {"sage": policy_figures(1.0, **shape) | figures}, **same, **rest}


def quick_validation(*_: Any, **__: Any) -> dict[str, Any]:
    """Replaces `VALIDATE` without decoding."""
    return quick_report()


def train_quickly(config: Config, validate: Validate = quick_validation) -> int:
    """Trains on one rank of this process with a validation that decodes nothing; returns the exit code."""
    from train.job.run import run_rank

    with mock.patch(VALIDATE, validate):
        return run_rank(config)


def make_target(where: Path, family: str = "qwen2_5_vl", layers: int = 2) -> Path:
    """An untrained pocket target with its processor, as a folder."""
    architecture.save_random(family, where / f"target_{family}", layers)
    return where / f"target_{family}"


def command(target: Path, run: Path, *overrides: str) -> list[str]:
    where = [f"target.path={target}", "target.dtype=fp32", f"run.dir={run}", f"data.cache_dir={run.parent}/cache"]
    has_kind = any(override.startswith(("draft=", "experiment=")) for override in overrides)
    return [*SMALL, *([] if has_kind else ["draft=eagle"]), *where, *overrides]


def configured(target: Path, run: Path, *overrides: str) -> Config:
    """The configuration of a short training run on one rank."""
    from train.config.hydra_app import compose
    from train.config.schema import Config

    one_rank = ["deepspeed=zero0", "launch.device=cpu"]
    return compose("config", [*command(target, run), *one_rank, *overrides], Config)


def configure(*overrides: str) -> Config:
    """The configuration of a run that is planned and not started."""
    from train.config.hydra_app import compose
    from train.config.schema import Config

    draft = [] if any(word.startswith(("draft=", "experiment=")) for word in overrides) else ["draft=eagle"]
    return compose("config", ["launch.plan=true", "data.path=/no/data", *draft, *overrides], Config)


def big(target: str, *overrides: str) -> LaunchPlan:
    from train.plan.estimate import plan

    return plan(configure(f"target={target}", "data=llava_instruct", *overrides))


def draft_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "draft" / "model.safetensors")


def metrics(run: Path) -> list[dict[str, Any]]:
    return read_metrics(run / "metrics.jsonl")


def train_until_signal(config: Config, ranks: Ranks, step: int, validate: Validate = quick_validation) -> None:
    """Trains until a signal is received during step `step`."""
    from train.job.build import building
    from train.job.loop import fit

    with mock.patch(VALIDATE, validate), building(config, ranks) as run:
        feed = run.loader

        class Interrupted:
            def __iter__(self) -> Any:
                for number, batches in enumerate(feed, start=1):
                    run.stop.is_set = number == step
                    yield batches

        run.loader = Interrupted()
        assert fit(run) is False


def sage_train(commands: ForkServer, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`sage-train` in a process of its own, warnings shown."""
    return _finished([*commands.command("train.cli.train"), *arguments], cwd)


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return _finished([sys.executable, *arguments], cwd)


def _finished(command_line: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command_line, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)


def environment() -> dict[str, str]:
    """One thread per process, the checkout on PYTHONPATH, no launcher variables."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def srun_variables(rank: int) -> dict[str, str]:
    """The variables of one of two ranks that srun starts on this machine."""
    facts = {"STEP_ID": 0, "STEP_NUM_TASKS": 2, "JOB_ID": os.getpid(), "STEP_NODELIST": "localhost"}
    return {f"SLURM_{name}": str(value) for name, value in (facts | {"PROCID": rank, "LOCALID": rank}).items()}


@contextmanager
def single_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prepares this process for a run: no launcher variables; restores the random generators."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    before = rng_state(torch.device("cpu"))
    yield
    set_rng_state(before, torch.device("cpu"))

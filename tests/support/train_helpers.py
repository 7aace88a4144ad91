"""A random pocket target on disk, and command lines that train on it in seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from data_prep.pocket import architecture, folder, training
from train.state.resume import rng_state, set_rng_state

if TYPE_CHECKING:
    from train.config.schema import Config
    from train.launch.ranks import Ranks

ROOT = Path(__file__).parents[2]
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
]


def make_target(where: Path, family: str = "qwen2_5_vl", layers: int = 2) -> Path:
    """An untrained pocket target with its processor, as a folder."""
    tokenizer = architecture.new_tokenizer(family, training.world_texts(50))
    model = architecture.new_model(family, tokenizer, layers, seed=0)
    folder.save(model, tokenizer, family, where / f"target_{family}")
    return where / f"target_{family}"


def command(target: Path, run: Path, *overrides: str) -> list[str]:
    """The arguments of a short training run."""
    where = [f"target.path={target}", "target.dtype=fp32", f"run.dir={run}", f"data.cache_dir={run.parent}/cache"]
    return [*SMALL, *where, *overrides]


def stopped_after(config: Config, ranks: Ranks, step: int) -> None:
    """Runs, with a signal arriving while step `step` is taken."""
    from train.run.build import building
    from train.run.loop import fit

    with building(config, ranks) as run:
        feed = run.loader

        class Interrupted:
            def __iter__(self) -> Any:
                for number, batches in enumerate(feed, start=1):
                    run.stop.is_set = number == step
                    yield batches

        run.loader = Interrupted()
        assert fit(run) is False


def sage_train(
    *arguments: str, cwd: Path, prefix: tuple[str, ...] = (), timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """`sage-train` in a process of its own, warnings shown."""
    return subprocess.run(
        [*(prefix or (sys.executable, "-m", "train.cli.train")), *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def environment() -> dict[str, str]:
    """One thread per process, our sources importable from anywhere, none of the launcher's variables."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


@contextmanager
def quiet_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run in this process: no launcher's variables, a judge that takes no time, the caller's generators as they were."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(
        "train.validation.in_loop.validate", lambda *_, **__: {"policies": {"sage": {"tokens_per_target_pass": 1.0}}}
    )
    monkeypatch.setattr("train.launch.launcher._summary", lambda *_: None)
    before = rng_state(torch.device("cpu"))
    yield
    set_rng_state(before, torch.device("cpu"))

"""Exact resume: what a run is besides weights, and how a whole state is saved and read back.

A state holds the engine's files (weights, float32 masters, optimizer), `trainer.json` (step, tokens, best score) and one
`rank_00000.pt` per rank (every random generator). The learning rate is a function of the step, and the data position follows
from the step and the seed, so neither needs a file.

Owns: what is in a state. Does not own: how it gets onto the disk whole (checkpoints.store).
"""

from __future__ import annotations

import json
import logging
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpoints.store import StateStore, write_text
from train.engine import Engine
from train.ranks import Ranks

logger = logging.getLogger(__name__)
TRAINER = "trainer.json"


@dataclass(kw_only=True)
class TrainState:
    """How far a run has come.

    Attributes:
        step: optimizer steps taken.
        tokens: tokens seen, padding not counted, over all ranks.
        time_s: seconds spent training, validation and saving not counted.
        best: highest validation tokens_per_target_pass so far.
        best_step: where that was.
    """

    step: int = 0
    tokens: int = 0
    time_s: float = 0.0
    best: float | None = None
    best_step: int | None = None


def save_state(store: StateStore, engine: Engine, ranks: Ranks, state: TrainState) -> None:
    """Saves a whole state under `state.step`. Every rank has to call it.

    Raises:
        OSError: it could not be written; the states before it are untouched.
    """
    if ranks.is_main:
        store.begin(state.step)
    ranks.barrier()
    part = store.part(state.step)
    engine.save(part)
    torch.save(rng_state(ranks.device), part / f"rank_{ranks.rank:05d}.pt")
    ranks.barrier()
    if ranks.is_main:
        write_text(part / TRAINER, json.dumps({**asdict(state), "world_size": ranks.world_size}, indent=1) + "\n")
        logger.info("saved %s", store.commit(state.step))
    ranks.barrier()


def load_state(store: StateStore, engine: Engine, ranks: Ranks) -> TrainState:
    """Restores the newest whole state into engine and generators. Every rank has to call it.

    Returns:
        how far the run had come; a fresh `TrainState` where nothing was saved yet.

    Raises:
        ValueError: every state is damaged, or it was saved by another number of ranks.
    """
    folder = ranks.share(store.newest() if ranks.is_main else None)
    if folder is None:
        logger.info("run.resume: nothing saved yet in %s, starting from the beginning", store.folder)
        return TrainState()
    trainer = json.loads((folder / TRAINER).read_text())
    saved_by = trainer.pop("world_size")
    if saved_by != ranks.world_size:
        raise ValueError(
            f"run.resume: {folder} was saved by {saved_by} rank(s), this run has {ranks.world_size}; "
            f"resume with launch.ranks={saved_by}"
        )
    engine.load(folder)
    set_rng_state(torch.load(folder / f"rank_{ranks.rank:05d}.pt", weights_only=False), ranks.device)
    logger.info("resumed from %s", folder)
    return TrainState(**trainer)


def rng_state(device: torch.device) -> dict[str, Any]:
    """Every generator a run draws from."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Puts the generators back to a state from `rng_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_everything(seed: int, rank: int) -> None:
    """Seeds the generators, each rank's differently; fresh weights are drawn from `seed` alone (see train.build)."""
    mixed = seed * 1_000_003 + rank
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.manual_seed(mixed)


def state_folder(run_dir: str | Path) -> Path:
    """Where a run keeps its states."""
    return Path(run_dir) / "state"

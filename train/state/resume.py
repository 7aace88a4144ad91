"""Exact resume: the content of a state, and how it is saved and loaded.

A state holds the engine's files (float32 weights and moments, unsharded and by name), `trainer.json` (step, tokens, best
score, fingerprints of the data) and one `rank_00000.safetensors` per rank (all random generators). The learning rate is a
function of the step, and the data position follows from step and seed, so neither is saved. No file is a pickle.

With the same number of ranks a resumed run is bit-for-bit identical on a CPU; on GPUs see `train.deterministic`. With another
number the order of float32 sums differs, and so do the random draws of new ranks, which start with fresh generators.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpoints.run_folder import BEST_DRAFT, DRAFT, state_folder, step_name
from checkpoints.store import StateStore, read_tensors, saving, write_tensors
from data_prep.build import open_sources
from data_prep.sources.base import Split
from sage.io.files import json_digest, read_json, write_text
from sage.io.folders import new_folder, remove_leftovers
from sage.io.manifest import write_manifest
from train.config.schema import Config, ConfigError, TrainConfig
from train.engine.engine import Engine
from train.launch.ranks import Ranks, RunDisk

logger = logging.getLogger(__name__)
TRAINER, RANK_FILE = "trainer.json", "rank_{:05d}.safetensors"
STATE_BYTES = 12  # per trained parameter: a float32 weight and two moments
NUM_DRAFTS = 3  # draft/, draft_best/, and the one that replaces either


@dataclass(kw_only=True)
class TrainState:
    """The progress of a run."""

    step: int = 0
    tokens: int = 0  # of all ranks, without padding
    time_s: float = 0.0  # of training, without validation and saving
    best: float | None = None  # highest validation score so far
    best_step: int | None = None
    stale: int = 0  # validations since then
    validated_step: int = 0  # step of the last validation; 0: none yet
    data: dict[str, str] | None = None  # see `fingerprint_data`; None: not recorded

    def has_stalled(self, patience: int, more: int = 0) -> bool:
        """Whether `patience` validations in a row, of which `more` are still to come, bring no better score; never with 0."""
        return 0 < patience <= self.stale + more


def save_state(store: StateStore, engine: Engine, ranks: Ranks, state: TrainState) -> None:
    """Saves a state as that of `state.step`; SaveFailed on every rank if one could not write. Every rank has to call it."""
    step = state.step
    _on_all_ranks(store, ranks, step, lambda: store.begin(step) if ranks.is_main else None)
    _on_all_ranks(store, ranks, step, lambda: _write(store.part(step), engine, ranks, state))
    _on_all_ranks(store, ranks, step, lambda: store.commit(step, state.best_step) if ranks.is_main else None)
    logger.info("saved %s", store.folder / step_name(state.step))


def save_draft(run: Path, engine: Engine, ranks: Ranks, step: int) -> Path:
    """Writes `draft/` of a run, with a manifest of checksums, and returns it; it loads in one process without DeepSpeed.

    Every rank has to call it; of several calls at a step, the first one writes. SaveFailed on rank 0 if it cannot.
    """
    folder = run / DRAFT
    if engine.draft_saved_at == step:
        return folder
    weights = engine.draft_state()
    if ranks.is_main:
        with saving(folder), new_folder(folder) as part:
            engine.student.save(part, weights)
            write_manifest(part, step)
    engine.draft_saved_at = step
    return folder


def _write(part: Path, engine: Engine, ranks: Ranks, state: TrainState) -> None:
    """Rank 0 alone writes: other ranks need not see its disk."""
    generators = ranks.gather_on_main(rng_state(ranks.device))
    engine.save(part)
    for rank, tensors in enumerate(generators):
        write_tensors(part / RANK_FILE.format(rank), tensors)
    if ranks.is_main:
        write_text(part / TRAINER, json.dumps({**asdict(state), "world_size": ranks.world_size}, indent=1) + "\n")


def _on_all_ranks(store: StateStore, ranks: Ranks, step: int, work: Callable[[], object]) -> None:
    """Runs this rank's part of a save; if it fails on one rank, raises its reason on all."""
    cause = None
    try:
        work()
    except OSError as error:
        cause = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    causes = list(filter(None, ranks.gather(cause)))
    if causes:
        failed = store.abandon(step, causes[0]) if ranks.is_main else None
        raise ranks.broadcast(failed)


def load_state(store: StateStore, engine: Engine, disk: RunDisk) -> TrainState:
    """Restores engine and generators from the newest complete state of rank 0. Every rank has to call it.

    Returns a fresh `TrainState` if nothing is saved. ValueError if every state is corrupt or of another draft or version, or
    another node has a newer one.
    """
    ranks = disk.ranks
    _check_newest(store, ranks)
    if ranks.is_main or disk.is_copying:
        remove_leftovers(store.folder)
    folder = ranks.broadcast(store.newest() if ranks.is_main else None)
    if folder is None:
        logger.info("run.resume: nothing is saved in %s, starting a new run", store.folder)
        return TrainState()
    readable = disk.fetch(folder)
    state, saved_by = read_progress(readable / TRAINER)
    engine.load(readable)
    if ranks.rank < saved_by:
        set_rng_state(read_tensors(readable / RANK_FILE.format(ranks.rank)), ranks.device)
    ranks.gather(None)  # until all ranks have read it
    if disk.is_copying:
        shutil.rmtree(readable)
    if saved_by != ranks.world_size:
        logger.info("saved with %d rank(s), resumed with %d: identical up to rounding", saved_by, ranks.world_size)
    logger.info("resumed from %s", folder)
    return state


def _check_newest(store: StateStore, ranks: Ranks) -> None:
    """Refuses to resume on a rank 0 whose disk lacks the newest state; launchers may number nodes in another order."""
    newest = ranks.gather((max(store.steps(), default=0), socket.gethostname(), str(store.folder.absolute())))
    step, host, folder = max(newest, key=lambda state: state[0])
    main_step, main_host, _ = newest[0]
    if step > main_step:
        raise ConfigError(
            f"run.resume: step {step} is saved on {host} in {folder}, but rank 0 is on {main_host}, where the newest is "
            f"{main_step or 'none'}; number {host} first (torchrun: --rdzv-backend=static --node-rank=0 there), or copy its "
            "run folder"
        )


def read_progress(file: Path) -> tuple[TrainState, int]:
    """Returns the progress of a run and the number of ranks that saved it; ValueError for the fields of another version."""
    stored = read_json(file)
    known = {field.name for field in fields(TrainState)} | {"world_size"}
    if unknown := sorted(stored.keys() - known) or sorted({"world_size"} - stored.keys()):
        raise ValueError(
            f"run.resume: {file}: {', '.join(unknown)}: {'unknown' if unknown[0] in stored else 'missing'}, known fields are "
            f"{', '.join(sorted(known))}; resume with the version that saved the state, or start anew in another run.dir"
        )
    saved_by = stored.pop("world_size")
    return TrainState(**stored), saved_by


# -- fingerprints of the training data (see `Source.fingerprint`), so that a run is not resumed with other examples ----------


def fingerprint_data(config: Config, dataset: Any) -> dict[str, str]:
    """Returns label -> hash of the content of every training source; a newer version can resume an older run with it."""
    opened = getattr(dataset, "sources", None) or getattr(dataset, "streams", None) or open_sources(config.data, Split.train)
    labels = config.data.resolved(Split.train)
    return {label: json_digest([source.fingerprint()]) for label, source in zip(labels, opened, strict=True)}


def check_same_data(config: Config, saved: dict[str, str] | None, current: dict[str, str]) -> None:
    """Raises ConfigError for the first source whose content has changed since `saved`; None: a new run."""
    for label, source in config.data.resolved(Split.train).items():
        if saved is not None and saved.get(label) != current[label]:
            raise ConfigError(
                f"data.path={source.path}: the content of data source {label} has changed since the run in {config.run.dir} "
                f"was started; resume with the original data, or start another run.dir"
            )


# -- random generators -----------------------------------------------------------------------------------------------------


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Returns the state of all random generators of a run as plain tensors."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": torch.tensor([version, *words]),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*np.asarray(keys).tolist(), int(position), int(has_gauss)]),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Restores the generators from a result of `rng_state`."""
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, float(state["numpy_gauss"])))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_everything(seed: int, rank: int) -> None:
    """Seeds the generators, differently on each rank; fresh weights are drawn from `seed` alone (see train.job.build)."""
    mixed = seed * 1_000_003 + rank
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.manual_seed(mixed)


# -- disk space --------------------------------------------------------------------------------------------------------------


def num_states(train: TrainConfig, steps: int | None) -> int:
    """Returns the highest number of states that a run of so many steps has on disk, with the one that is being written.

    Of a run without a limit of steps, those of `train.keep_every` are not counted.
    """
    if steps is None:
        return train.keep_last + 2
    saves = steps // train.save_every + bool(steps % train.save_every) if train.save_every else 1
    kept = train.keep_last + 1  # and that of the best draft
    if train.keep_every and train.save_every:
        kept += sum(step % train.keep_every == 0 for step in range(train.save_every, steps + 1, train.save_every))
    return min(saves, kept) + 1


def check_space(run: Path, train: TrainConfig, steps: int | None, num_trained: int, draft_bytes: int) -> None:
    """Raises ConfigError if states of `num_trained` parameters and the drafts do not fit on the disk of the run's folder."""
    states = num_states(train, steps)
    needed = states * num_trained * STATE_BYTES + NUM_DRAFTS * draft_bytes
    nearest = next(folder for folder in (run.absolute(), *run.absolute().parents) if folder.exists())
    files = (path for folder in (state_folder(run), run / DRAFT, run / BEST_DRAFT) for path in folder.rglob("*"))
    free = shutil.disk_usage(nearest).free + sum(path.stat().st_size for path in files if path.is_file())  # of a resumed run
    if needed > free:
        raise ConfigError(
            f"run.dir={run}: needs {_shown(needed)} for up to {states} state(s) and the drafts, {_shown(free)} are free there; "
            "free space, lower train.keep_last, raise train.save_every or train.keep_every, or give a run.dir on another disk"
        )


def _shown(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.2f} MB"

"""Training runs of the studies: `sage-train` in a separate process, once per command line."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

from benchmarks.papers.figures import digest
from benchmarks.papers.settings import Settings
from sage.io.files import write_text
from sage.io.manifest import sha256

logger = logging.getLogger(__name__)
MARKER = "trained"  # written into a run folder when training is complete: the digest of the run
DRAFT = "draft"
LOG_TAIL_LINES = 12


class TrainingFailed(RuntimeError):
    """sage-train exited with an error; the message holds the last lines of its log."""


def overrides(settings: Settings, name: str) -> list[str]:
    """Returns the arguments of sage-train for a run, without the folder; raises ValueError for a run without settings."""
    known = settings.training.runs
    if name not in known:
        raise ValueError(f"training.runs: {name!r} is not one of {', '.join(known)}")
    common = [] if known[name].is_alone else settings.training.common
    return [*common, *known[name].overrides, *known[name].extra, *settings.training.last]


def run_digest(settings: Settings, name: str) -> str:
    """Returns a hash of the run's overrides and of the target's weights."""
    target = settings.training.runs[name].target
    return digest([overrides(settings, name), weights_digest(settings.targets[target])])


@cache
def weights_digest(path: str) -> str:
    """Returns a hash of a target's weights; a hub id is returned as it is."""
    files = sorted(Path(path).glob("*.safetensors"))
    return digest([sha256(file) for file in files]) if files else path


def run_folder(settings: Settings, name: str) -> Path:
    """Returns the folder of a run."""
    return Path(settings.runs_dir) / name


def command_line(settings: Settings, name: str) -> str:
    """Returns the run as a shell command."""
    words = [word if " " not in word else f"'{word}'" for word in overrides(settings, name)]
    return " ".join(["sage-train", *words, f"run.dir={run_folder(settings, name)}"])


def is_trained(settings: Settings, name: str) -> bool:
    """Whether the run folder exists, is complete and has the same digest."""
    marker = run_folder(settings, name) / MARKER
    return marker.is_file() and marker.read_text(encoding="utf-8") == run_digest(settings, name)


def ensure_trained(settings: Settings, name: str) -> Path:
    """Returns the run folder; trains the run if it is missing, incomplete or of other overrides.

    Raises:
        TrainingFailed: sage-train exited with an error.
    """
    folder = run_folder(settings, name)
    if is_trained(settings, name):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{folder.name}.log")
    logger.info("training %s (log: %s)", name, log)
    start = time.perf_counter()
    # On the CPU, also where there is a GPU: two ranks need two GPUs, and all figures of the page are those of a CPU. One thread
    # per rank, as in `experiment=demo`: two small ranks use two cores better than two threads of one rank.
    command = [sys.executable, "-m", "train.cli.train", "launch.device=cpu", *overrides(settings, name), f"run.dir={folder}"]
    with log.open("w", encoding="utf-8") as out:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_TAIL_LINES:])
        raise TrainingFailed(f"sage-train ended with exit code {done.returncode}, see {log}:\n{tail}")
    logger.info("trained %s in %.0f s", name, time.perf_counter() - start)
    write_text(folder / MARKER, run_digest(settings, name))
    return folder

"""Training runs that results need: `sage-train` in a process of its own, once per command line."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks.papers.figures import digest
from benchmarks.papers.settings import Settings
from sage.files import write_text
from sage.manifest import sha256

logger = logging.getLogger(__name__)
MARK = "trained"  # in a run folder that is whole: its identity
DRAFT = "draft"
LAST_LINES = 12


class RunFailed(RuntimeError):
    """sage-train ended with an error; its last lines are the message."""


def overrides(settings: Settings, name: str) -> list[str]:
    """What sage-train is told for a run, the run folder left out.

    Raises:
        ValueError: no such run in the settings.
    """
    known = settings.training.runs
    if name not in known:
        raise ValueError(f"training.runs: {name!r} is none of {', '.join(known)}")
    run = known[name]
    return [*settings.training.common, *run.overrides, *run.extra, *settings.training.last]


def identity(settings: Settings, name: str) -> str:
    """What a run is: its overrides and the target's weights; another target under the same path is another run."""
    return digest([overrides(settings, name), weights(settings.targets[settings.training.runs[name].target])])


@cache
def weights(path: str) -> str:
    """A target's weights, by content; a hub id stands for itself."""
    files = sorted(Path(path).glob("*.safetensors"))
    return digest([sha256(file) for file in files]) if files else path


def folder_of(settings: Settings, name: str) -> Path:
    """The run's folder."""
    return Path(settings.runs_dir) / name


def command(settings: Settings, name: str) -> str:
    """The run as a person would type it."""
    words = [word if " " not in word else f"'{word}'" for word in overrides(settings, name)]
    return " ".join(["sage-train", *words, f"run.dir={folder_of(settings, name)}"])


def is_trained(settings: Settings, name: str) -> bool:
    """Whether the run is there, whole, and the same."""
    mark = folder_of(settings, name) / MARK
    return mark.is_file() and mark.read_text(encoding="utf-8") == identity(settings, name)


def trained(settings: Settings, name: str) -> Path:
    """The run's folder, trained first where it is missing, was interrupted or had other overrides.

    Raises:
        RunFailed: sage-train ended with an error.
    """
    folder = folder_of(settings, name)
    if is_trained(settings, name):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    logger.info("training %s (log: %s)", name, _log(folder))
    start = time.perf_counter()
    _sage_train([*overrides(settings, name), f"run.dir={folder}"], _log(folder))
    logger.info("trained %s in %.0f s", name, time.perf_counter() - start)
    write_text(folder / MARK, identity(settings, name))
    return folder


def _log(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def _sage_train(words: Sequence[str], log: Path) -> None:
    """One thread per rank, as `experiment=demo` has it: two small ranks use two cores better than two threads of one."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w", encoding="utf-8") as out:
        done = subprocess.run(
            [sys.executable, "-m", "train.cli.train", *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
        )
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise RunFailed(f"sage-train ended with exit code {done.returncode}, see {log}:\n" + "\n".join(lines[-LAST_LINES:]))

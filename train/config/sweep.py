"""Records of the jobs of a sweep: each job writes one, in any process or on any machine, the starting process reads them.

Does not own: running the jobs (Hydra's launcher), comparing them (train.report.compare).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode

from sage.commands.cli import EXIT_STOPPED, NOTHING_SAVED
from sage.io.files import read_json, write_text

FOLDER = "SAGE_SWEEP"  # environment variable with the folder of the records
SEARCHING = ("sweep=", "hydra/sweeper=", "hydra.sweeper.")  # choices of a sweeper
LONGEST_NAME = 200  # characters of a folder's name; file systems end at 255


@dataclass(kw_only=True)
class Job:
    """The record of one job: the overrides that distinguish it, its run folder, exit code, and error as one line."""

    number: int
    name: str
    dir: str | None = None
    code: int = 0
    error: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal stopped the job, which is then no failure."""
        return self.code == EXIT_STOPPED or self.error == NOTHING_SAVED

    def write(self) -> None:
        folder = Path(os.environ[FOLDER])
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"job_{self.number:05d}.json", json.dumps(asdict(self)) + "\n")


def read_jobs(folder: Path) -> list[Job]:
    """Reads all records, ordered by job number; ValueError for a damaged one, or one of another version."""
    jobs = []
    for path in sorted(folder.glob("job_*.json")):
        try:
            jobs.append(Job(**read_json(path)))
        except TypeError as error:
            reason = "a job of this sweep ran with another version of sage-draft; use one version on all machines"
            raise ValueError(f"{path}: no record of a job ({error}); {reason}") from error
    return jobs


def failures(jobs: Sequence[Job]) -> str | None:
    """Returns one line with every failed job, its exit code and its error; None if no job failed."""
    failed = [job for job in jobs if job.code and not job.is_stopped]
    if not failed:
        return None
    named = "; ".join(f"{job.name or 'the only job'} (exit {job.code}: {job.error})" for job in failed)
    return f"{len(failed)} of {len(jobs)} jobs failed: {named}"


def swept(arguments: Sequence[str]) -> tuple[list[str], int | None]:
    """Returns the keys with several values on a command line, which distinguish the jobs of its sweep, and the number of jobs.

    The number is None if a sweeper that searches decides it.
    """
    keys, number = [], None if any(argument.startswith(SEARCHING) for argument in arguments) else 1
    for argument in arguments:
        try:
            override = OverridesParser.create().parse_override(argument)
        except HydraException:  # an option like -m, or a mistake that Hydra reports
            continue
        if not override.is_sweep_override():
            continue
        keys.append(override.get_key_element().lstrip("+~"))
        count = sum(1 for _ in override.sweep_string_iterator()) if override.is_discrete_sweep() else None
        number = None if number is None or count is None else number * count
    return keys, number


def is_sweep() -> bool:
    """Whether Hydra is running the jobs of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def name_of_job(keys: Sequence[str]) -> str:
    """Names the current job by its overrides of the swept keys, for example `optim.lr=0.001 seed=1`."""
    current = HydraConfig.get()
    overrides = [override.lstrip("+~") for override in current.overrides.task]
    return " ".join(override for override in overrides if override.split("=")[0] in keys) or current.job.override_dirname


def job_line(number: int, total: int | None, name: str, seconds: Sequence[float]) -> str:
    """Returns `job 2 of 3: optim.lr=0.001, about 0:12:00 left` from the durations of the finished jobs; `number` from 0."""
    position = f"job {number + 1}" if total is None else f"job {number + 1} of {total}"
    if total is None or not seconds:
        return f"{position}: {name}"
    left_s = round(sum(seconds) / len(seconds) * (total - number))
    return f"{position}: {name}, about {timedelta(seconds=left_s)} left"


def folder_name(job: str) -> str:
    """Returns a folder name that needs no quoting in a shell or an override: `optim.lr_0.001-seed_1`."""
    name = re.sub(r"[^\w.+-]+", "_", job.replace(" ", "-")).strip("_")
    digest = hashlib.sha256(job.encode()).hexdigest()[:8]
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}-{digest}"

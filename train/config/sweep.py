"""What the jobs of one sweep leave behind, and what is said when all are done.

Every job writes one record, whatever process or machine it ran on; the process that started the sweep reads them at the end.

Owns: the records. Does not own: who runs the jobs (Hydra's launcher), the comparison (train.report.compare).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from sage.files import write_text

FOLDER = "SAGE_SWEEP"  # the environment variable that hands the sweep's folder to its jobs
ROOT = Path("runs") / ".sweep"
LONGEST_NAME = 200  # characters of a folder's name; file systems end at 255


@dataclass(kw_only=True)
class Job:
    """One job of a sweep: `name` is what it changes, `dir` its run folder, `code` its exit code, `error` its last line."""

    number: int
    name: str
    dir: str | None = None
    code: int = 0
    error: str | None = None


class Ending(Protocol):
    """What a command adds to a sweep: a job's figure for a sweeper that searches, and a last word on all jobs."""

    def score(self, config: Any) -> float | None: ...

    def conclude(self, jobs: Sequence[Job]) -> None: ...


def open_folder() -> Path:
    """Names a new sweep's folder in the environment; nothing is made before a job is done."""
    folder = ROOT.absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    os.environ[FOLDER] = str(folder)
    return folder


def write_job(job: Job) -> None:
    """Leaves a job's record, from rank 0."""
    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"job_{job.number:05d}.json", json.dumps(asdict(job)) + "\n")


def read_jobs(folder: Path) -> list[Job]:
    """All records, in the order the jobs were numbered; none where there was no sweep."""
    return [Job(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("job_*.json"))]


def swept_keys(words: Sequence[str]) -> list[str]:
    """The keys to which a command line gives several values: what tells the jobs of its sweep apart."""
    found = []
    for word in words:
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException:  # an option like -m, or a mistake that Hydra will name
            continue
        if override.is_sweep_override():
            found.append(override.get_key_element().lstrip("+~"))
    return found


def job_name(overrides: Sequence[str], keys: Sequence[str], otherwise: str) -> str:
    """What a job changes: `optim.lr=0.001 seed=1`.

    Args:
        overrides: of the job, `key=value`.
        keys: those to tell; without any, `otherwise` is the name.
    """
    told = [word.lstrip("+~") for word in overrides if word.lstrip("+~").split("=")[0] in keys]
    return " ".join(told) or otherwise


def folder_name(job: str) -> str:
    """A job's name as a folder that needs no quoting, neither in a shell nor in an override: `optim.lr_0.001-seed_1`."""
    name = re.sub(r"[^\w.+-]+", "_", job.replace(" ", "-")).strip("_")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(job.encode()).hexdigest()[:8]}"


def failures(jobs: Sequence[Job]) -> str | None:
    """One line that names every failed job, its exit code and its error; None if there are none."""
    failed = [job for job in jobs if job.code]
    if not failed:
        return None
    named = "; ".join(f"{job.name or 'the only job'} (exit {job.code}: {job.error})" for job in failed)
    return f"{len(failed)} of {len(jobs)} jobs failed: {named}"

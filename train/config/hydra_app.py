"""Runs a command line through Hydra: composes and types the configuration, turns errors into one line and an exit code.

Each job of a sweep writes a record, in any process or on any machine; the starting process reads and compares them. Imports no
torch, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from checkpoints.run_folder import is_run
from sage.commands import cli
from sage.io.files import config_dir, read_json, write_text
from sage.io.tables import counted
from sage.io.target_paths import gguf_of, path_of_target
from train.config.command_line import as_mistake, expand, refuse_unknown, refuse_unknown_options, task_overrides
from train.config.derived import shorten_validation
from train.config.help import help_text
from train.config.resuming import with_own_config
from train.config.schema import Config, ConfigError
from train.config.store import key_of, register

Schema = TypeVar("Schema")
FULL_ERROR = "HYDRA_FULL_ERROR"  # environment variable; makes Hydra raise errors instead of printing them and exiting
SWEEP_FOLDER = "SAGE_SWEEP"  # environment variable with the folder of the records
SEARCHING = ("sweep=", "hydra/sweeper=", "hydra.sweeper.")  # choices of a sweeper
LONGEST_NAME = 200  # characters of a folder's name; file systems end at 255


class SweepStopped(BaseException):
    """A job was stopped by a signal, with this exit code; no `Exception`, after which Hydra would start the next job."""


@dataclass(kw_only=True)
class Job:
    """The record of a job: the overrides that distinguish it, its run folder, exit code, and error as one line."""

    number: int
    name: str
    dir: str | None = None
    code: int = 0
    error: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal stopped the job, which is then no failure."""
        return self.code == cli.EXIT_STOPPED or self.error == cli.NOTHING_SAVED


@dataclass(kw_only=True)
class App:
    """A command with a composed configuration. Hydra calls it: once for a single run, once per job of a sweep."""

    config_name: str  # a file in `conf/` without `.yaml`
    schema: type
    task: Callable[[Any], int]  # takes an instance of `schema`, returns an exit code
    is_main: bool  # whether this process is rank 0
    reports_errors: bool | None = None  # whether this process prints errors; None: if it is rank 0
    score: Callable[[Any], float | None] = lambda config: None  # of a job, for sweepers that search
    compare: Callable[[Sequence[Job]], None] = lambda jobs: None  # all jobs at the end of a sweep
    leading: Sequence[str] = ()  # options that the command itself takes as its first word
    _swept_keys: list[str] = field(default_factory=list)
    _num_jobs: int | None = None
    _codes: list[int] = field(default_factory=list)  # of the jobs that ran in this process
    _seconds: list[float] = field(default_factory=list)  # their durations
    _error: str | None = None
    _has_traceback: bool = False

    __name__ = "job"  # read by Hydra

    def run(self) -> int:
        """Runs the command line of this process.

        Returns the exit code: the task's (the largest of a sweep), 2 after a user's mistake, 130 after an interrupt before
        anything was saved, 1 after any other error.
        """
        if "--version" in sys.argv:
            print(cli.version_text())
            return cli.EXIT_DONE
        self._has_traceback = cli.pop_debug_flag()
        os.environ[FULL_ERROR] = "1"
        try:
            return self._guard(self._run)
        finally:
            del os.environ[FULL_ERROR]

    def _run(self) -> int:
        """Prints the help, or runs all jobs and compares them; returns the largest exit code."""
        refuse_unknown_options(sys.argv[1:], self.schema, self.leading)
        words = sys.argv[1:] = expand(sys.argv[1:], self.schema)
        register()
        if {"-h", "--help"} & set(words):
            print(help_text(self.config_name, self.schema, words), flush=True)
            return cli.EXIT_DONE
        self._swept_keys, self._num_jobs = swept(words)
        folder = Path("runs/.sweep").absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        os.environ[SWEEP_FOLDER] = str(folder)  # is created when the first job of a sweep is done
        start = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=self.config_name)(self)
        code = self._guard(lambda: start() or max(self._codes, default=cli.EXIT_DONE))
        return max(code, self._guard(lambda: self._summarize(folder)))

    def __call__(self, composed: DictConfig) -> float | None:
        """Runs one job, possibly in another process than `run`; a failed job does not end a sweep.

        Returns the score of a sweep's job, for sweepers that search; None after a failure.
        """
        register()
        configs: list[Any] = []

        def work() -> int:
            configs.append(to_object(composed, self.schema, task_overrides(), self._swept_keys))
            return self.task(configs[0])

        self._error = None
        if not is_sweep():
            self._codes.append(self._guard(work))
            return None
        job, started = Job(number=int(HydraConfig.get().job.num), name=name_of_job(self._swept_keys)), time.monotonic()
        if self.is_main:
            print(job_line(job.number, self._num_jobs, job.name, self._seconds), file=sys.stderr, flush=True)
        job.code = self._guard(work)
        job.error = self._error
        self._codes.append(job.code)
        self._seconds.append(time.monotonic() - started)
        if self.is_main:
            job.dir = configs[0].run.dir if configs and hasattr(configs[0], "run") else None
            write_text(Path(os.environ[SWEEP_FOLDER]) / f"job_{job.number:05d}.json", json.dumps(asdict(job)) + "\n")
        if job.is_stopped:
            raise SweepStopped(job.code)
        return self.score(configs[0]) if job.code == cli.EXIT_DONE else None

    def _guard(self, work: Callable[[], int]) -> int:
        """Runs `work`; turns every error into a line on stderr and an exit code."""
        try:
            return work()
        except KeyboardInterrupt:
            self._error = cli.NOTHING_SAVED
            return cli.print_error(self._error, cli.EXIT_INTERRUPTED, self.is_main)
        except SweepStopped as stopped:
            if self.is_main:
                jobs = "" if self._num_jobs is None else f", {counted(self._num_jobs - len(self._codes) + 1, 'job')} left"
                print(f"stopped{jobs}; repeat the command with run.resume=true to go on", file=sys.stderr)
            return int(stopped.args[0])
        except BrokenPipeError:
            return cli.ignore_broken_pipe()
        except Exception as raised:
            error = as_mistake(raised, self.schema)
            self._error = cli.message_of(error)
            return cli.report(error, self.is_main if self.reports_errors is None else self.reports_errors, self._has_traceback)

    def _summarize(self, folder: Path) -> int:
        """Compares the jobs recorded in `folder` and prints the failed ones; returns the largest of their exit codes."""
        jobs = read_jobs(folder)
        if jobs and self.is_main:
            self.compare(jobs)
        if failed := failures(jobs):
            cli.print_error(failed, cli.EXIT_USER, self.is_main)
        return max((job.code for job in jobs), default=cli.EXIT_DONE)


def to_object(composed: DictConfig, schema: type[Schema], overrides: Sequence[str], swept_keys: Sequence[str] = ()) -> Schema:
    """Converts a DictConfig to its dataclass; the target's GGUF file is dequantized here, after Hydra's own checks.

    Each job of a sweep gets a run folder named by the `swept_keys`. A resumed run has its own configuration with the
    `overrides` applied to it; a job of a sweep that had not started starts anew.
    """
    refuse_unknown(composed, schema)
    path = OmegaConf.select(composed, "target.path")
    if path is not None and gguf_of(os.path.expanduser(path)):
        composed.target.path = path_of_target(path)
    is_own = False
    if "run" in composed:
        if is_sweep():
            if is_run(Path(composed.run.dir)):
                needed = "a sweep needs a folder for the runs of its jobs; give another"
                raise ConfigError(f"run.dir={composed.run.dir}: already holds a run; {needed}")
            composed.run.dir = str(Path(composed.run.dir) / folder_name(name_of_job(swept_keys)))
        if is_own := composed.run.resume and (is_run(Path(composed.run.dir)) or not is_sweep()):
            composed = with_own_config(composed, overrides)
    config: Any = OmegaConf.to_object(composed)
    assert isinstance(config, schema), f"{type(config).__name__} is not {schema.__name__}"
    if schema is Config and not is_own:
        shorten_validation(cast(Config, config), {key_of(override) for override in overrides})
    return config


def compose(config_name: str, overrides: list[str], schema: type[Schema]) -> Schema:
    """Returns the configuration of a command line with these overrides; any mistake is a ConfigError of one line."""
    register()
    try:
        with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
            words = expand(overrides, schema)
            return to_object(hydra.compose(config_name, overrides=words), schema, words)
    except Exception as error:
        if (mistake := as_mistake(error, schema)) is not error:
            raise mistake from error
        raise


# -- the jobs of a sweep -----------------------------------------------------------------------------------------------------


def is_sweep() -> bool:
    """Whether Hydra is running the jobs of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


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


def name_of_job(keys: Sequence[str]) -> str:
    """Names the current job by its overrides of the swept keys, for example `optim.lr=0.001 seed=1`."""
    overrides = [override.lstrip("+~") for override in task_overrides()]
    swept_values = " ".join(override for override in overrides if override.split("=")[0] in keys)
    return swept_values or HydraConfig.get().job.override_dirname


def folder_name(job: str) -> str:
    """Returns a folder name that needs no quoting in a shell or an override: `optim.lr_0.001-seed_1`."""
    name = re.sub(r"[^\w.+-]+", "_", job.replace(" ", "-")).strip("_")
    digest = hashlib.sha256(job.encode()).hexdigest()[:8]
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}-{digest}"


def job_line(number: int, total: int | None, name: str, seconds: Sequence[float]) -> str:
    """Returns `job 2 of 3: optim.lr=0.001, about 0:12:00 left` from the durations of the finished jobs; `number` from 0."""
    if total is None:
        return f"job {number + 1}: {name}"
    left_s = round(sum(seconds) / len(seconds) * (total - number)) if seconds else 0
    return f"job {number + 1} of {total}: {name}" + (f", about {timedelta(seconds=left_s)} left" if seconds else "")


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
    failed = [f"{job.name or 'the only job'} (exit {job.code}: {job.error})" for job in jobs if job.code and not job.is_stopped]
    return f"{len(failed)} of {len(jobs)} jobs failed: {'; '.join(failed)}" if failed else None

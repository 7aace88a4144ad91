"""Runs a command line through Hydra: composes and types the configuration, turns errors into one line and an exit code.

Owns: composition, the jobs of a sweep. Does not own: the work of a command, the classes of errors (sage.commands.cli).
Imports no torch, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from checkpoints.run_folder import is_run
from sage.commands.cli import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_USER,
    NOTHING_SAVED,
    ignore_broken_pipe,
    message_of,
    pop_debug_flag,
    print_error,
    report,
    version_text,
)
from sage.io.files import config_dir
from train.config import sweep
from train.config.errors import as_mistake, refuse_unknown
from train.config.help import help_text
from train.config.overrides import expand, key_of, options_of, refuse_unknown_options, task_overrides
from train.config.resolvers import register_resolvers
from train.config.resuming import with_own_config
from train.config.schema import Config, ConfigError
from train.config.sharding import shorten_validation
from train.config.sweep import SweepScore

FULL_ERROR = "HYDRA_FULL_ERROR"

Task = Callable[[Any], int]


class SweepStopped(BaseException):
    """A job was stopped by a signal; the remaining jobs are not started. `exit_code` is that of the job.

    No `Exception`: Hydra would catch it and start the next job.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def run_app(
    config_name: str,
    schema: type,
    task: Task,
    is_main: Callable[[], bool],
    sweep_score: SweepScore | None = None,
    leading: Sequence[str] = (),
    reports_errors: Callable[[], bool] | None = None,
) -> int:
    """Composes `config_name` from the command line and runs `task(config)`.

    Args:
        config_name: a file in `conf/` without `.yaml`.
        task: takes an instance of `schema`, returns an exit code.
        is_main: whether this process is rank 0.
        sweep_score: scores and compares the jobs of a sweep; None for commands without sweeps.
        leading: options that the command itself takes as its first word.
        reports_errors: whether this process prints errors; default: `is_main`.

    Returns:
        the exit code: the task's (the largest of a sweep), 2 after a user's mistake, 130 after an interrupt before anything was
        saved, 1 after any other error.
    """
    if "--version" in sys.argv:
        print(version_text())
        return EXIT_DONE
    before = {name: os.environ.get(name) for name in (FULL_ERROR, sweep.FOLDER)}
    job = SweepJob(schema, task, is_main, sweep_score, pop_debug_flag(), reports_errors or is_main)
    try:
        return job.guard(lambda: _run(config_name, job, leading))
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _run(config_name: str, job: SweepJob, leading: Sequence[str]) -> int:
    """Prints the help, or runs all jobs and compares them; returns the largest exit code."""
    refuse_unknown_options(sys.argv[1:], options_of(job.schema), leading)
    words = sys.argv[1:] = expand(sys.argv[1:], job.schema)
    register_resolvers()
    if {"-h", "--help"} & set(words):
        print(help_text(config_name, job.schema, words), flush=True)
        return EXIT_DONE
    os.environ[FULL_ERROR] = "1"  # makes Hydra raise errors instead of printing them and exiting
    job.swept_keys, job.num_jobs = sweep.swept(words)
    folder = sweep.open_folder()

    def run_jobs() -> int:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(job)()
        return max(job.codes, default=EXIT_DONE)

    return max(job.guard(run_jobs), job.guard(lambda: job.summarize(folder)))


class SweepJob:
    """The function that Hydra calls: once for a single run, once per job of a sweep, possibly in another process.

    Attributes:
        swept_keys: keys with several values on the command line.
        num_jobs: jobs of the sweep; None: unknown.
        codes: exit codes of the jobs that ran in this process.
        seconds: their durations.
    """

    __name__ = "job"  # read by Hydra

    def __init__(
        self,
        schema: type,
        task: Task,
        is_main: Callable[[], bool],
        sweep_score: SweepScore | None,
        has_traceback: bool,
        reports_errors: Callable[[], bool],
    ) -> None:
        self.reports_errors = reports_errors
        self.schema, self.task, self.is_main = schema, task, is_main
        self.sweep_score, self.has_traceback = sweep_score, has_traceback
        self.swept_keys: list[str] = []
        self.num_jobs: int | None = None
        self.codes: list[int] = []
        self.seconds: list[float] = []
        self.error: str | None = None

    def __call__(self, composed: DictConfig) -> float | None:
        """Runs one job. A failed job does not end a sweep.

        Returns:
            the score of a sweep's job, for sweepers that search; None after a failure.
        """
        register_resolvers()  # a Hydra launcher may run jobs in other processes
        configs: list[Any] = []

        def work() -> int:
            configs.append(to_object(composed, self.schema, task_overrides(), self.swept_keys))
            return self.task(configs[0])

        self.error = None
        if is_sweep() and self.is_main():
            number, name = int(HydraConfig.get().job.num), name_of_job(self.swept_keys)
            print(sweep.job_line(number, self.num_jobs, name, self.seconds), file=sys.stderr, flush=True)
        started = time.monotonic()
        code = self.guard(work)
        self.codes.append(code)
        self.seconds.append(time.monotonic() - started)
        if not is_sweep():
            return None
        if self.is_main():
            folder = getattr(configs[0], "run", None) if configs else None
            record = sweep.Job(number=number, name=name, code=code, error=self.error)
            sweep.write_job(replace(record, dir=folder.dir if folder else None))
        if sweep.is_stopped(code, self.error):
            raise SweepStopped(code)
        return self.sweep_score.score(configs[0]) if self.sweep_score and code == EXIT_DONE else None

    def guard(self, work: Callable[[], int]) -> int:
        """Runs `work`; turns every error into a line on stderr and an exit code."""
        try:
            return work()
        except KeyboardInterrupt:
            self.error = NOTHING_SAVED
            return print_error(self.error, EXIT_INTERRUPTED, self.is_main())
        except SweepStopped as stopped:
            if self.is_main():
                print(sweep.stopped_line(self.num_jobs, len(self.codes) - 1), file=sys.stderr)
            return stopped.exit_code
        except BrokenPipeError:
            return ignore_broken_pipe()
        except Exception as raised:
            error = as_mistake(raised, self.schema)
            self.error = message_of(error)
            return report(error, self.reports_errors(), self.has_traceback)

    def summarize(self, folder: Path) -> int:
        """Compares the jobs recorded in `folder` and prints the failed ones; returns the largest of their exit codes."""
        jobs = sweep.read_jobs(folder)
        if jobs and self.is_main() and self.sweep_score is not None:
            self.sweep_score.compare(jobs)
        if failed := sweep.failures(jobs):
            print_error(failed, EXIT_USER, self.is_main())
        return max((job.code for job in jobs), default=EXIT_DONE)


def is_sweep() -> bool:
    """Whether Hydra is running the jobs of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def name_of_job(swept_keys: Sequence[str]) -> str:
    """Returns the overrides that distinguish the current job of a sweep."""
    current = HydraConfig.get()
    return sweep.job_name(list(current.overrides.task), swept_keys, current.job.override_dirname)


def to_object(composed: DictConfig, schema: type, overrides: Sequence[str], swept_keys: Sequence[str] = ()) -> Any:
    """Converts a DictConfig to its dataclass.

    Each job of a sweep gets a run folder named by the `swept_keys`. A resumed run has its own configuration with the
    `overrides` applied to it; a job of a sweep that had not started starts anew.
    """
    refuse_unknown(composed, schema)
    is_own = False
    if "run" in composed:
        if is_sweep():
            if is_run(Path(composed.run.dir)):
                needed = "a sweep needs a folder for the runs of its jobs; give another"
                raise ConfigError(f"run.dir={composed.run.dir}: already holds a run; {needed}")
            composed.run.dir = str(Path(composed.run.dir) / sweep.folder_name(name_of_job(swept_keys)))
        if is_own := composed.run.resume and (is_run(Path(composed.run.dir)) or not is_sweep()):
            composed = with_own_config(composed, overrides)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, schema), f"{type(config).__name__} is not {schema.__name__}"
    if isinstance(config, Config) and not is_own:
        shorten_validation(config, {key_of(override) for override in overrides})
    return config


def compose(config_name: str, overrides: list[str], schema: type) -> Any:
    """Returns the configuration of a command line with these overrides, for tests and other programs.

    Any mistake is a ConfigError of one line.
    """
    register_resolvers()
    try:
        with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
            words = expand(overrides, schema)
            return to_object(hydra.compose(config_name, overrides=words), schema, words)
    except Exception as error:
        if (mistake := as_mistake(error, schema)) is not error:
            raise mistake from error
        raise

"""Runs a command line through Hydra: composes and types the configuration, turns errors into one line and an exit code.

Owns: composition, the jobs of a sweep. Does not own: the work of a command, the classes of errors (train.console). Imports no
torch, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from checkpoints.run_folder import is_run
from sage.commands.cli import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER, pop_debug_flag, version_text
from sage.io.files import config_dir, package_dir
from train.config import sweep
from train.config.errors import as_mistake, refuse_unknown
from train.config.help import help_text
from train.config.overrides import expand, key_of, options_of, refuse_unknown_options, task_overrides
from train.config.resuming import with_own_config
from train.config.schema import Config, ConfigError
from train.config.sharding import shorten_validation
from train.config.store import register
from train.config.sweep import SweepScore
from train.config.target_path import lr_for_width, target_dtype, target_name
from train.console.errors import NOTHING_SAVED, is_crash, message_of, print_error, report

FULL_ERROR = "HYDRA_FULL_ERROR"
LONGEST_PART = 40  # characters of a part of a run's name

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
) -> int:
    """Composes `config_name` from the command line and runs `task(config)`.

    Args:
        config_name: a file in `conf/` without `.yaml`.
        task: takes an instance of `schema`, returns an exit code.
        is_main: whether this process is rank 0, which alone prints errors.
        sweep_score: scores and compares the jobs of a sweep; None for commands without sweeps.
        leading: options that the command itself takes as its first word.

    Returns:
        the exit code: the task's (the largest of a sweep), 2 after a user's mistake, 130 after an interrupt before anything was
        saved, 1 after any other error.
    """
    if "--version" in sys.argv:
        print(version_text())
        return EXIT_DONE
    try:
        refuse_unknown_options(sys.argv[1:], options_of(schema), leading)
        sys.argv[1:] = expand(sys.argv[1:])
    except ConfigError as error:
        return report(error, is_main())
    before = {name: os.environ.get(name) for name in (FULL_ERROR, sweep.FOLDER)}
    words = sys.argv[1:]
    job = SweepJob(schema, task, is_main, sweep_score, pop_debug_flag(), sweep.swept_keys(words), sweep.num_jobs(words))
    if {"-h", "--help"} & set(sys.argv):
        return job.guard(lambda: _print_help(config_name, schema))
    os.environ[FULL_ERROR] = "1"  # makes Hydra raise errors instead of printing them and exiting
    register_resolvers()
    folder = sweep.open_folder()

    def run_all() -> int:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(job)()
        return max(job.codes, default=EXIT_DONE)

    try:
        return max(job.guard(run_all), job.guard(lambda: job.summarize(folder)))
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _print_help(config_name: str, schema: type) -> int:
    """Prints the help of a command; returns the exit code."""
    register_resolvers()
    print(help_text(config_name, schema, sys.argv[1:]), flush=True)
    return EXIT_DONE


class SweepJob:
    """The function that Hydra calls: once for a single run, once per job of a sweep, possibly in another process.

    Args:
        swept_keys: keys with several values on the command line.
        num_jobs: jobs of the sweep; None: unknown.

    Attributes:
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
        show_traceback: bool,
        swept_keys: Sequence[str] = (),
        num_jobs: int | None = None,
    ) -> None:
        self.schema, self.task, self.is_main = schema, task, is_main
        self.sweep_score, self.show_traceback = sweep_score, show_traceback
        self.swept_keys = list(swept_keys)
        self.num_jobs = num_jobs
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
        except BrokenPipeError:  # the reader of the output, `head` for example, has exited
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_DONE
        except Exception as raised:
            error = as_mistake(raised, self.schema)
            if self.show_traceback and not is_crash(error):
                traceback.print_exc()
            self.error = message_of(error)
            return report(error, self.is_main())

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
            words = expand(overrides)
            return to_object(hydra.compose(config_name, overrides=words), schema, words)
    except Exception as error:
        if (mistake := as_mistake(error, schema)) is not error:
            raise mistake from error
        raise


def register_resolvers() -> None:
    """Registers the schemas and the resolvers `${NAME:...}` of the YAML files.

    `run_name:TARGET,DRAFT,PATH,DATA,OBJECTIVE` is the default name of a run. `package_dir:PACKAGE` is the folder of an
    installed package, found without importing it; `target_name:PATH` and `target_dtype:PATH` are the name and precision of a
    target given by its path.
    """
    register()
    for resolve in (package_dir, run_name, target_name, target_dtype, lr_for_width):
        OmegaConf.register_new_resolver(resolve.__name__, resolve, replace=True)


def run_name(target: str, draft: str, path: str | None, data: str, objective: str) -> str:
    """Returns `TARGET-DRAFT-DATA`, with `-OBJECTIVE` if it is not the draft's own.

    Args:
        path: `data.path`; names the data by its last part without suffix, because one format has many files.
        data: `data.name`, for data without a path.
    """
    parts = [target, draft, Path(path).name.split(".")[0] if path else data]
    if objective not in ("", draft):
        parts.append(objective)
    return "-".join(plain_name(part)[:LONGEST_PART] for part in parts)


def plain_name(part: str) -> str:
    """Replaces characters that a shell or Hydra would interpret."""
    return re.sub(r"[^\w.]+", "_", part).strip("_.") or "data"

"""Runs a command line through Hydra: composes, types, checks, and turns every mistake into one line and an exit code.

Owns: the meeting of Hydra with our schema, its errors in our words, logging of the command line process. Does not own: any
command's work. Nothing here imports torch, so `--help` and mistakes answer at once.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from sage.cli import EXIT_CRASH, EXIT_DONE, EXIT_STOPPED, EXIT_USER, pop_debug_flag
from train.config import sweep
from train.config.errors import explain, is_config_mistake, refuse_unknown
from train.config.schema import ConfigError, config_dir, register
from train.config.sweep import Ending
from train.config.target_path import target_dtype, target_name, with_choice

FULL_ERROR = "HYDRA_FULL_ERROR"

Task = Callable[[Any], int]


class SweepStopped(Exception):
    """A job was stopped by a signal, so the jobs after it are not started."""

    exit_code = EXIT_STOPPED


def run_app(config_name: str, schema: type, task: Task, ending: Ending | None = None) -> int:
    """Composes `config_name` from the command line and runs `task(config)`.

    Args:
        config_name: a file in `conf/` without `.yaml`.
        schema: the dataclass the composed configuration must be.
        task: gets an instance of `schema`, answers with an exit code.
        ending: a sweep's score and last word; None for commands that have none.

    Returns:
        the exit code: the task's (the largest of a sweep), 2 after a user's mistake, 1 after anything unforeseen.
    """
    before = {name: os.environ.get(name) for name in (FULL_ERROR, sweep.FOLDER)}
    sys.argv[1:] = with_choice(sys.argv[1:])
    job = SweepJob(schema, task, ending, pop_debug_flag(), sweep.swept_keys(sys.argv[1:]))
    os.environ[FULL_ERROR] = "1"  # so that Hydra hands errors on instead of printing them and exiting
    register()
    register_resolvers()
    folder = sweep.open_folder()

    def whole() -> int:
        hydra.main(version_base="1.3", config_path=config_path(), config_name=config_name)(job)()
        return max(job.codes, default=EXIT_DONE)

    try:
        code = job.guard(whole)
        jobs = sweep.read_jobs(folder)
        return max(code, job.guard(lambda: _conclude(jobs, ending))) if jobs else code
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class SweepJob:
    """What Hydra calls: once for a single run, once per job of a sweep, there perhaps in another process.

    Args:
        swept: keys that the command line gives several values.

    Attributes:
        codes: exit codes of the jobs that ran in this process.
    """

    __name__ = "job"  # Hydra reads it

    def __init__(
        self, schema: type, task: Task, ending: Ending | None, wants_traceback: bool, swept: Sequence[str] = ()
    ) -> None:
        self.schema, self.task, self.ending, self.wants_traceback = schema, task, ending, wants_traceback
        self.swept = list(swept)
        self.codes: list[int] = []
        self.error: str | None = None

    def __call__(self, composed: DictConfig) -> float | None:
        """Runs one job; a failed one does not end a sweep.

        Returns:
            a sweep's job its score, for sweepers that search; None after a failure.
        """
        register_resolvers()  # a launcher may have brought us into a process of its own
        configs: list[Any] = []

        def work() -> int:
            configs.append(to_object(composed, self.schema, self.swept))
            return self.task(configs[0])

        self.error = None
        code = self.guard(work)
        self.codes.append(code)
        if not is_sweep():
            return None
        if os.environ.get("RANK", "0") == "0":
            folder = getattr(configs[0], "run", None) if configs else None
            record = sweep.Job(number=int(HydraConfig.get().job.num), name=name_of_job(self.swept), code=code, error=self.error)
            sweep.write_job(replace(record, dir=folder.dir if folder else None))
        if code == EXIT_STOPPED:
            raise SweepStopped("stopped; the jobs after this one were not started")
        return self.ending.score(configs[0]) if self.ending and code == EXIT_DONE else None

    def guard(self, work: Callable[[], int]) -> int:
        """Runs `work`; every error becomes a line on stderr and an exit code."""
        try:
            return work()
        except KeyboardInterrupt:
            return self._say("stopped before anything was saved", EXIT_STOPPED)
        except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_DONE
        except Exception as error:
            if self.wants_traceback and not is_crash(error):
                traceback.print_exc()
            self.error = message_of(error, self.schema)
            return report(error, self.schema)

    def _say(self, message: str, code: int) -> int:
        self.error = message
        return _say(message, code)


def _conclude(jobs: list[sweep.Job], ending: Ending | None) -> int:
    """The last word on a sweep; the exit code is the largest of its jobs'."""
    if os.environ.get("RANK", "0") == "0" and ending is not None:
        ending.conclude(jobs)
    if failed := sweep.failures(jobs):
        _say(failed, EXIT_USER)
    return max(job.code for job in jobs)


def is_sweep() -> bool:
    """Whether Hydra is running the jobs of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def report(error: Exception, schema: type) -> int:
    """Prints `error` for a person: mistakes as one line (exit code 2), the rest with its traceback (exit code 1).

    An exception may bring its own `exit_code` and `details` (printed above the line).
    """
    message = message_of(error, schema)
    if hasattr(error, "exit_code"):
        print(getattr(error, "details", ""), end="", file=sys.stderr)
        return _say(message, int(error.exit_code))
    if not is_crash(error):
        return _say(message, EXIT_USER)
    traceback.print_exception(error)
    return _say(message, EXIT_CRASH)


def message_of(error: Exception, schema: type) -> str:
    """What a person reads of an error, in one line."""
    if is_config_mistake(error):
        return explain(error, schema)
    is_ours = not is_crash(error) or hasattr(error, "exit_code")
    return " ".join((str(error) if is_ours else f"{type(error).__name__}: {error}").split())


def is_crash(error: BaseException) -> bool:
    """Whether an error is ours rather than the user's, so that its traceback is wanted."""
    return isinstance(error, UnicodeError) or not (isinstance(error, (ValueError, OSError)) or is_config_mistake(error))


def name_of_job(swept: Sequence[str]) -> str:
    """What the current job of a sweep changes."""
    facts = HydraConfig.get()
    return sweep.job_name(list(facts.overrides.task), swept, facts.job.override_dirname)


def to_object(composed: DictConfig, schema: type, swept: Sequence[str] = ()) -> Any:
    """The one place where a DictConfig becomes a dataclass; jobs of a sweep get a folder each, named by the `swept` keys."""
    refuse_unknown(composed, schema)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, schema), f"{type(config).__name__} is not {schema.__name__}"
    if is_sweep() and hasattr(config, "run"):
        config.run.dir = str(Path(config.run.dir) / sweep.folder_name(name_of_job(swept)))
    return config


def compose(config_name: str, overrides: list[str], schema: type) -> Any:
    """The same configuration object a command line with these overrides would get, for tests and other programs.

    Raises:
        ConfigError: any mistake, in one line.
    """
    register()
    register_resolvers()
    try:
        with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
            return to_object(hydra.compose(config_name, overrides=with_choice(overrides)), schema)
    except Exception as error:
        if is_config_mistake(error):
            raise ConfigError(explain(error, schema)) from error
        raise


def config_path() -> str:
    """Hydra's name for `config_dir`."""
    return "pkg://train._conf" if importlib.util.find_spec("train._conf") else str(config_dir())


def register_resolvers() -> None:
    """What YAML files ask for by `${NAME:...}`.

    `package_dir:PACKAGE` is the folder of an installed package, found without importing it; `target_name:PATH` and
    `target_dtype:PATH` are told of a target by its path.
    """
    OmegaConf.register_new_resolver("package_dir", _package_dir, replace=True)
    OmegaConf.register_new_resolver("target_name", target_name, replace=True)
    OmegaConf.register_new_resolver("target_dtype", target_dtype, replace=True)


def configure_logging(debug: bool, is_speaking: bool = True) -> None:
    """Handlers once per process: messages to stderr, from rank 0 alone; other ranks only report errors."""
    level = (logging.DEBUG if debug else logging.INFO) if is_speaking else logging.ERROR
    handler = StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    for name in ("train", "data_prep", "checkpoints", "sage"):
        own = logging.getLogger(name)
        own.handlers, own.propagate = [handler], False
        own.setLevel(level)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever stderr is at the time: a live progress bar puts itself in its place and draws around us."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _package_dir(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations, name
    return str(Path(list(spec.submodule_search_locations)[0]).resolve())


def _say(message: str, code: int) -> int:
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code

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
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from sage.cli import wants_debug
from train.config import ConfigError, config_dir, register
from train.config_errors import explain, is_config_mistake, refuse_unknown

EXIT_DONE, EXIT_CRASH, EXIT_USER, EXIT_STOPPED = 0, 1, 2, 3
FULL_ERROR = "HYDRA_FULL_ERROR"

Task = Callable[[Any], int]


def run_app(config_name: str, schema: type, task: Task) -> int:
    """Composes `config_name` from the command line and runs `task(config)`.

    Args:
        config_name: a file in `conf/` without `.yaml`.
        schema: the dataclass the composed configuration must be.
        task: gets an instance of `schema`, answers with an exit code.

    Returns:
        the exit code: the task's (the largest of a sweep), 2 after a user's mistake, 1 after anything unforeseen.
    """
    before = os.environ.get(FULL_ERROR)
    wants_traceback = wants_debug()
    os.environ[FULL_ERROR] = "1"  # so that Hydra hands errors on instead of printing them and exiting
    register()
    register_resolvers()
    codes: list[int] = []

    def guarded(work: Callable[[], int]) -> int:
        try:
            return work()
        except KeyboardInterrupt:
            return _say("stopped before anything was saved", EXIT_STOPPED)
        except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_DONE
        except Exception as error:
            if wants_traceback and not is_crash(error):
                traceback.print_exc()
            return report(error, schema)

    def job(composed: DictConfig) -> None:
        codes.append(guarded(lambda: task(to_object(composed, schema))))  # one failed job does not end a sweep

    def whole() -> int:
        hydra.main(version_base="1.3", config_path=config_path(), config_name=config_name)(job)()
        return max(codes, default=EXIT_DONE)

    try:
        return guarded(whole)
    finally:
        os.environ.pop(FULL_ERROR)
        if before is not None:
            os.environ[FULL_ERROR] = before
        if before is not None:
            os.environ[FULL_ERROR] = before


def report(error: Exception, schema: type) -> int:
    """Prints `error` for a person: mistakes as one line (exit code 2), the rest with its traceback (exit code 1).

    An exception may bring its own `exit_code` and `details` (printed above the line).
    """
    if hasattr(error, "exit_code"):
        print(getattr(error, "details", ""), end="", file=sys.stderr)
        return _say(str(error), int(error.exit_code))
    if is_config_mistake(error):
        return _say(explain(error, schema), EXIT_USER)
    if not is_crash(error):
        return _say(str(error), EXIT_USER)
    traceback.print_exception(error)
    return _say(f"{type(error).__name__}: {error}", EXIT_CRASH)


def is_crash(error: BaseException) -> bool:
    """Whether an error is ours rather than the user's, so that its traceback is wanted."""
    return isinstance(error, UnicodeError) or not (isinstance(error, (ValueError, OSError)) or is_config_mistake(error))


def to_object(composed: DictConfig, schema: type) -> Any:
    """The one place where a DictConfig becomes a dataclass; jobs of a sweep get a folder each."""
    refuse_unknown(composed, schema)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, schema), f"{type(config).__name__} is not {schema.__name__}"
    is_sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    if is_sweep and hasattr(config, "run"):
        config.run.dir = str(Path(config.run.dir) / HydraConfig.get().job.override_dirname)
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
            return to_object(hydra.compose(config_name, overrides=overrides), schema)
    except Exception as error:
        if is_config_mistake(error):
            raise ConfigError(explain(error, schema)) from error
        raise


def config_path() -> str:
    """Hydra's name for `config_dir`."""
    return "pkg://train._conf" if importlib.util.find_spec("train._conf") else str(config_dir())


def register_resolvers() -> None:
    """`${package_dir:NAME}` is the folder of an installed package, found without importing it."""
    OmegaConf.register_new_resolver("package_dir", _package_dir, replace=True)


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
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code

"""Running a training job from Python."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from checkpoints.run_folder import read_reports
from sage.commands.cli import EXIT_DONE
from train.config.checks import check
from train.config.hydra_app import compose as compose_config
from train.config.schema import Config, ConfigError
from train.job.callbacks import Callback
from train.job.rank import run_rank
from train.launch.launcher import launch, ranks_key
from train.monitor.sinks import check_tracking


def compose(*overrides: str) -> Config:
    """Returns the configuration of `sage-train` with these overrides: `compose("target=qwen2_5_vl_7b", "optim.lr=1e-4")`.

    Raises:
        ConfigError: an unknown key, a wrong type or a missing value, in one line.
    """
    config: Config = compose_config("config", list(overrides), Config)
    return config


def run(config: Config, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Trains a draft head and returns the report of the last validation (the content of report.json).

    Equivalent to `sage-train`: starts `launch.gpus` or `launch.ranks` ranks and resumes with `run.resume=true`. Ranks and
    the workers of `data.num_workers` import the script that calls this function, so the call belongs below
    `if __name__ == "__main__":`. Messages go to the loggers `train`, `sage`, `data_prep` and `checkpoints`.

    Raises:
        ConfigError: a setting that cannot be run; nothing is loaded or written.
        ValueError: target, draft, data or the state to resume from do not fit.
        TrainingError, RankFailed: training failed.
        KeyboardInterrupt: stopped by a signal; the state is saved, `run.resume=true` continues.
    """
    if config.launch.plan:
        raise ConfigError("launch.plan=true: has no effect in train.run; use sage-train")
    check(config)
    check_tracking(config)
    check_main_guard(config)
    if launch(config, partial(run_rank, callbacks=tuple(callbacks))) != EXIT_DONE:
        raise KeyboardInterrupt(f"stopped and saved; continue {config.run.dir} with run.resume=true")
    _, report = read_reports(Path(config.run.dir))[-1]
    return report


def check_main_guard(config: Config) -> None:
    """Raises ConfigError if processes will import a script that has no `if __name__ == "__main__":`, and train again."""
    key = ranks_key(config.launch)
    ranks = config.launch.gpus or config.launch.ranks or 1
    workers = config.data.num_workers
    cause = f"{key}={ranks}" if ranks > 1 else "" if workers == 0 else f"data.num_workers={workers or 'null'}"
    path = getattr(sys.modules["__main__"], "__file__", None)  # none in a notebook or an interactive interpreter
    if not cause or path is None or has_main_guard(Path(path)):
        return
    remedy = 'put the call below `if __name__ == "__main__":`'
    raise ConfigError(f"{cause}: starts processes that import {path}, which would train again there; {remedy}")


def has_main_guard(script: Path) -> bool:
    """Returns whether a script has a statement `if __name__ == ...` at its top level; True if it cannot be read as Python."""
    try:
        statements = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return True
    return any(isinstance(one, ast.If) and "__name__" in ast.unparse(one.test) for one in statements)

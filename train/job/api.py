"""Running a training job from Python."""

from __future__ import annotations

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
from train.launch.launcher import launch
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

    Equivalent to `sage-train`: starts `launch.gpus` or `launch.ranks` ranks and resumes with `run.resume=true`. A script that
    starts several ranks needs the usual `if __name__ == "__main__":`. Messages go to the loggers `train`, `sage`, `data_prep`
    and `checkpoints`.

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
    if launch(config, partial(run_rank, callbacks=tuple(callbacks))) != EXIT_DONE:
        raise KeyboardInterrupt(f"stopped and saved; continue {config.run.dir} with run.resume=true")
    _, report = read_reports(Path(config.run.dir))[-1]
    return report

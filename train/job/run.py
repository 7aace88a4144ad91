"""Running a training job from Python, and the work of one of its ranks.

torch and everything built on it are imported inside the functions, so that a signal during the imports interrupts at once.
"""

from __future__ import annotations

import ast
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.run_folder import REPORT_HTML, REPORT_PAGE, read_reports, validation_folder
from sage.commands.cli import EXIT_DONE, EXIT_STOPPED
from train.config.checks import check
from train.config.hydra_app import compose as compose_config
from train.config.schema import Config, ConfigError, Device
from train.job.callbacks import Callback
from train.launch.cluster_env import set_torch_defaults
from train.launch.launcher import launch, ranks_key
from train.launch.supervisor import StopFlag
from train.monitor.sinks import check_tracking

if TYPE_CHECKING:
    from train.job.loop import TrainingRun


def compose(*overrides: str) -> Config:
    """Returns the configuration of `sage-train` with these overrides: `compose("target=qwen2_5_vl_7b", "optim.lr=1e-4")`.

    ConfigError of one line for an unknown key, a wrong type or a missing value.
    """
    return compose_config("config", list(overrides), Config)


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
    ranks, workers = config.launch.gpus or config.launch.ranks or 1, config.data.num_workers
    path = getattr(sys.modules["__main__"], "__file__", None)  # none in a notebook or an interactive interpreter
    if path is None or (ranks == 1 and workers == 0):
        return
    try:
        statements = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # not Python
        return
    if not any(isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test) for statement in statements):
        cause = f"{ranks_key(config.launch)}={ranks}" if ranks > 1 else f"data.num_workers={workers or 'null'}"
        remedy = 'put the call below `if __name__ == "__main__":`'
        raise ConfigError(f"{cause}: starts processes that import {path}, which would train again there; {remedy}")


def run_rank(config: Config, callbacks: Sequence[Callback] = ()) -> int:
    """Trains on this process's rank, and prints a summary on rank 0; returns 0 when done, 3 if stopped by a signal."""
    with ExitStack() as stack:
        stop = stack.enter_context(StopFlag())
        set_torch_defaults()
        import torch

        if config.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA is initialized
        if config.launch.device is Device.cpu or not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed probes for one when transformers imports it
        from train.job.build import building
        from train.job.loop import fit
        from train.launch.ranks import process_group

        ranks = stack.enter_context(process_group(str(config.launch.device), config.launch.timeout_s))
        training = stack.enter_context(building(config, ranks, stop))
        training.callbacks = callbacks if ranks.is_main else ()
        stop.is_polled = True
        is_done = training.is_finished or fit(training)
        summary = _summarize(training, is_done) if ranks.is_main else None
    if summary is not None:
        print(summary)  # after the progress display has closed
    return EXIT_DONE if is_done else EXIT_STOPPED


def _summarize(run: TrainingRun, is_done: bool) -> str:
    """The table of the last validation and the paths of report and draft."""
    from checkpoints.export.serving import serving_line
    from sage.bench.report_table import format_table
    from train.report.verdict import verdict_lines

    folder = run.config.run.dir
    if not is_done:
        step = f"step {run.state.step} of a run of {run.length}"
        return f"{folder}: stopped at {step} and saved; continue with sage-train --resume {shlex.quote(folder)}"
    if run.is_finished:
        last, report = read_reports(Path(folder))[-1]
        run.report = report | {"path": str(validation_folder(folder, last))}
        longer = "train.max_steps=N, train.epochs=N or train.max_minutes=N"
        print(f"{folder}: already finished at step {last}; {longer} trains it longer")
    assert run.report is not None
    serving, *_ = serving_line(run.engine.draft, run.teacher.target.model.config).partition("; not by")  # said at the start
    home = Path(run.report["path"])
    paths = [f"report: {home / REPORT_PAGE}", f"draft: {folder}/draft: {serving}", f"page: {home / REPORT_HTML}"]
    return "\n".join([format_table(run.report), "", *verdict_lines(run.report), *paths])

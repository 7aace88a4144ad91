"""The work of one rank: joins the process group, builds the run, trains, and prints a summary on rank 0.

torch and everything built on it are imported inside the function, so that a signal during the imports interrupts at once.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from sage.commands.cli import EXIT_DONE, EXIT_STOPPED
from train.config.schema import Config, Device
from train.launch.cluster_env import set_torch_defaults
from train.launch.signals import StopFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from train.job.callbacks import Callback
    from train.job.loop import TrainingRun
    from train.validation.validate import Validate


def run_rank(config: Config, validate: Validate | None = None, callbacks: Sequence[Callback] = ()) -> int:
    """Trains on this process's rank.

    Args:
        validate: replaces `train.validation.validate.validate`.
        callbacks: called on rank 0.

    Returns:
        the exit code: 0 done, 3 stopped by a signal after saving.
    """
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
        run = stack.enter_context(building(config, ranks, stop, validate))
        run.callbacks = callbacks if ranks.is_main else ()
        stop.is_polled = True
        is_done = run.is_finished or fit(run)
        summary = _summarize(run, is_done) if ranks.is_main else None
    if summary is not None:
        print(summary)  # after the progress display has closed
    return EXIT_DONE if is_done else EXIT_STOPPED


def _summarize(run: TrainingRun, is_done: bool) -> str:
    """The table of the last validation and the paths of report and draft."""
    from checkpoints.export.serving import serving_line
    from checkpoints.run_folder import REPORT_HTML, REPORT_PAGE, read_reports, validation_folder
    from sage.bench.report_table import format_table
    from train.report.verdict import verdict_lines

    folder = run.config.run.dir
    if not is_done:
        step = f"step {run.state.step} of a run of {run.length}"
        return f"{folder}: stopped at {step} and saved; continue with sage-train --resume {folder}"
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

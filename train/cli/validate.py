"""sage-validate: measures a saved draft with the decoder and prints the table and the path of the report."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from checkpoints.run_folder import REPORT, REPORT_HTML, REPORT_PAGE, draft_step, run_of
from sage.commands.cli import EXIT_DONE, EXIT_STOPPED, run
from sage.drafts.location import find_draft
from sage.io.files import check_writable
from sage.io.manifest import refuse_corrupt_draft
from train.config.checks import check_decode, check_path, check_ranges
from train.config.command_line import launch_keys, refuse_unused, task_overrides
from train.config.hydra_app import App
from train.config.resuming import with_run_of_draft
from train.config.schema import ConfigError, TrainConfig, ValidateConfig
from train.config.store import key_of
from train.launch import cluster_env
from train.launch.launcher import configure_logging
from train.report.compare import run_command

COMPARE = "--compare"
RUNS = Path("runs")  # contains the checks of drafts without a run, whose folder is only read
UNUSED = dict.fromkeys(launch_keys("device", "threads"), "in sage-validate, which measures in one process; remove it") | {
    "data.answers": "in sage-validate, which reads prompts alone; remove it",
}


def main() -> None:
    """Entry point of the console script."""
    if sys.argv[1:2] == [COMPARE]:
        sys.exit(run(lambda: print(run_command(sys.argv[2:]))))  # of finished runs, without measuring
    is_main = cluster_env.is_main_rank()
    app = App(config_name="validate", schema=ValidateConfig, task=run_validation, is_main=is_main, leading=(COMPARE,))
    sys.exit(app.run())


def run_validation(config: ValidateConfig) -> int:
    """Measures one checkpoint.

    ConfigError, before any model is loaded, for no checkpoint, no target, or a setting out of range; ValueError for a draft
    made for another target, or a prompt that cannot be prepared.
    """
    given = task_overrides()
    refuse_unused(given, UNUSED)
    if [key_of(override) for override in given].count("checkpoint") > 1:
        raise ConfigError("checkpoint: given twice (draft= is another name for it); give one draft")
    if config.checkpoint is None:
        raise ConfigError("checkpoint: missing; give checkpoint=RUN, or draft=DIR with target=NAME")
    draft = find_draft(config.checkpoint, "checkpoint")
    refuse_corrupt_draft(draft)  # before a large target is loaded
    config = with_run_of_draft(config, draft, run_of(draft), given)
    check_ranges(config)
    check_decode(config)
    check_path("target.path", config.target.path)
    configure_logging(config.debug)
    report = _measure(config, draft)
    return EXIT_STOPPED if "partial" in report else EXIT_DONE


def _measure(config: ValidateConfig, folder: Path) -> dict[str, Any]:
    """Loads target and draft, measures, writes the report and prints its table; returns the report.

    Ctrl-C ends the measurement; the prompts that were decoded completely are reported.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    import sage
    from data_prep.build import prompts
    from sage.bench.report_table import format_table
    from train.launch.ranks import pick_device
    from train.monitor.progress import open_display
    from train.report.verdict import verdict_lines
    from train.validation.prompts import PromptSet
    from train.validation.validate import ReportInfo, build_policies, validate

    step, run_folder = draft_step(folder) or None, run_of(folder)  # step 0 is that of an imported draft
    info = ReportInfo(
        run_dir=config.out or run_folder or RUNS,
        step=step,
        draft_name=str(folder),
        check=None if config.out and step is not None else folder.absolute().name,
        run=run_folder,
    )
    check_writable(info.folder / REPORT)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    if config.launch.threads is not None:
        torch.set_num_threads(config.launch.threads)
    policies = build_policies(config.decode)
    held_out = prompts(config.data, "validation", config.decode.num_prompts)  # before the target, which takes minutes to load
    target = config.target.load(pick_device(str(config.launch.device), 0), config.decode.dtype, config.device_map)
    assert target.processor is not None
    target.processor.thinking = config.data.thinking.flag
    draft = sage.load_draft(folder, target)
    prompt_set, ends = PromptSet(target, config.decode, held_out), (KeyboardInterrupt,)
    with closing(open_display(None, TrainConfig.log_interval_s, is_main=True)) as display:
        options: dict[str, Any] = {"policies": policies, "progress": display.show_validation, "ends": ends}
        report = validate(config.decode, target, draft, prompt_set, info, **options)
    assert report is not None
    print("\n".join([format_table(report), "", *verdict_lines(report)]))
    print(f"report: {Path(report['path']) / REPORT_PAGE}\npage: {Path(report['path']) / REPORT_HTML}")
    return report


if __name__ == "__main__":
    main()

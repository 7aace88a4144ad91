"""sage-train: composes and checks the configuration, then starts the ranks or prints a plan."""

from __future__ import annotations

import logging
import sys

from data_prep.config import Answers
from sage.commands.cli import EXIT_DONE, EXIT_USER
from train.cli.data import WITHOUT_SERVER
from train.config.checks import check
from train.config.command_line import refuse_unused, task_overrides
from train.config.hydra_app import App
from train.config.resuming import changes
from train.config.schema import Config
from train.config.store import key_of
from train.launch import cluster_env
from train.launch.launcher import configure_logging
from train.report.compare import compare_jobs, score_of_run

logger = logging.getLogger(__name__)
NOTHING_CHOSEN = """\
error: no target and no data are given; choose one of
  sage-train experiment=demo                                         the demonstration, minutes on two cores
  sage-train target=pocket_qwen2_5_vl|qwen2_5_vl_7b data.path=FILE   your own data
  sage-train --help                                                  every choice and key"""


def main() -> None:
    """Entry point of the console script."""
    if not [word for word in sys.argv[1:] if word != "--debug"]:
        if cluster_env.is_main_rank():
            print(NOTHING_CHOSEN, file=sys.stderr)
        sys.exit(EXIT_USER)
    app = App(
        config_name="config",
        schema=Config,
        task=train,
        is_main=cluster_env.is_main_rank(),
        reports_errors=cluster_env.is_first_on_node(),
        score=score_of_run,
        compare=compare_jobs,
    )
    sys.exit(app.run())


def train(config: Config) -> int:
    """Checks the configuration before torch is imported, then trains or plans."""
    given = {key_of(override) for override in task_overrides()}
    if config.run.resume and cluster_env.detect_launcher() is not None and not {"launch.gpus", "launch.ranks"} & given:
        config.launch.gpus = config.launch.ranks = None  # those of the run's last launch: the launcher decides
    refuse_unused(task_overrides(), _unused_answer_keys(config))
    check(config)
    if not config.launch.plan:
        from train.monitor.sinks import check_tracking

        check_tracking(config)
    configure_logging(config.debug)
    for change in changes(config):
        logger.info("%s: resumed with %s", config.run.dir, change)
    if config.launch.plan:
        from train.plan.data import plan_data
        from train.plan.estimate import plan
        from train.plan.text import render
        from train.validation.validate import build_policies

        build_policies(config.decode)
        print(render(plan(config, plan_data(config, config.launch.gpus or config.launch.ranks or 1))))
        return EXIT_DONE
    from train.job.run import run_rank
    from train.launch.launcher import launch

    return launch(config, run_rank)


def _unused_answer_keys(config: Config) -> dict[str, str]:
    """Returns the keys about the target's own answers that have no effect, and the remedy."""
    if config.data.answers is Answers.given:
        return {"regenerate.": "without data.answers=target; give it, or remove this"}
    if not config.regenerate.server:
        return WITHOUT_SERVER
    return {f"regenerate.{key}": "with regenerate.server, which decodes; remove it" for key in ("draft", "policy")}


if __name__ == "__main__":
    main()

"""sage-data: checks, converts and regenerates data, with the `data` and `target` choices of sage-train."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from data_prep.config import RegenerateConfig, check_paths, check_server, read_key, validate
from data_prep.own_answers import is_quickly_measured
from data_prep.sources.base import Split
from sage.commands.cli import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED, NOTHING_SAVED
from sage.drafts.location import find_draft
from sage.io.files import check_writable
from sage.io.ranges import NonNegativeInt
from train.config.checks import check_path, check_ranges
from train.config.command_line import launch_keys, refuse_unused, task_overrides
from train.config.hydra_app import App
from train.config.schema import ConfigError, DataConfig, LaunchConfig, TargetConfig
from train.config.store import plain_name
from train.launch import cluster_env
from train.launch.launcher import check_devices, configure_logging, spawn
from train.launch.supervisor import RankFailed, StopFlag

logger = logging.getLogger(__name__)


Action = StrEnum("Action", ["check", "convert", "regenerate"])
NUM_OWN = 64  # examples of which own answers are measured by default
WITH_SERVER = dict.fromkeys(
    ("regenerate.draft", "regenerate.policy", "launch.", "target.dtype", "target.attention", "target.revision"),
    "with regenerate.server, which decodes; remove it",
)
SERVER_KEYS = ("model", "concurrency", "images", "retries", "retry_delay_s", "timeout_s", "key_variable")
WITHOUT_SERVER = dict.fromkeys(
    (f"regenerate.{key}" for key in SERVER_KEYS), "without regenerate.server; give it, or remove this"
)


@dataclass(kw_only=True)
class DataCommand:
    """The configuration of `sage-data`.

    Attributes:
        action: `check` prepares examples, computes statistics and writes a page; `convert` writes `messages` rows;
            `regenerate` replaces the answers by those of the target.
        split: the part of the data.
        out: the page (`check`; default `runs/data/DATA-TARGET.html`, named after the
            file of `data.path`) or the rows (`.jsonl`).
        limit: number of examples to check, 0: all; of a stream the first ones.
        shown: number of examples on the page.
        own: number of examples of which the share of tokens that are the target's own choice is measured, with the target's
            weights; null: 64 if the target is a local folder of at most 1 GB, else 0.
        debug: detailed log.
    """

    action: Action = Action.check
    split: Split = Split.train
    out: str = ""
    limit: NonNegativeInt = 1000
    shown: NonNegativeInt = 24
    own: NonNegativeInt | None = None
    debug: bool = False
    data: DataConfig = field(default_factory=lambda: DataConfig(sources={}))
    target: TargetConfig = field(default_factory=TargetConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)


def main() -> None:
    """Entry point of the console script."""
    ConfigStore.instance().store(name="prepare_schema", node=DataCommand)
    sys.exit(App(config_name="prepare", schema=DataCommand, task=run, is_main=cluster_env.is_main_rank()).run())


def run(config: DataCommand) -> int:
    """Checks the settings before torch is imported, then runs the action."""
    refuse_unused(task_overrides(), _unused_keys(config))
    check(config)
    configure_logging(config.debug, is_main=cluster_env.is_main_rank())
    data_name = Path(config.data.path).name or config.data.name
    out = Path(config.out or f"runs/data/{plain_name(data_name.split('.')[0])}-{plain_name(config.target.name)}.html")
    check_writable(out)
    if config.action is Action.regenerate:
        ranks = config.launch.gpus or config.launch.ranks or 1
        is_alone = "RANK" in os.environ or bool(config.regenerate.server)  # a rank of a launcher, or one that asks a server
        if not is_alone:
            check_devices(config.launch, ranks)
        return _regenerate(config) if is_alone or ranks == 1 else spawn(partial(_regenerate, config), ranks, config.debug)
    from data_prep.tools import actions
    from sage.targets.loading import load_processor

    processor = load_processor(config.target.path)
    if config.action is Action.convert:
        count = actions.convert(config.data, processor, str(config.split), out)
        print(f"{count} conversations: {out}")
        return EXIT_DONE
    statistics, dataset = actions.check_data(config.data, processor, str(config.split), config.limit)
    count = NUM_OWN * is_quickly_measured(config.target.path) if config.own is None else config.own
    if count:
        target, _ = _load_models(config)
        statistics.own = actions.measure_own_answers(dataset, target, str(config.split), count)
    actions.write_report(out, f"{data_name} for {config.target.name}", statistics, dataset, str(config.split), config.shown)
    print("\n".join(actions.described(dataset)))
    print(statistics.as_text())
    print(f"page: {out}")
    if warning := statistics.own_warning:
        logger.warning("%s", warning)
    return EXIT_DONE


def _unused_keys(config: DataCommand) -> dict[str, str]:
    """Returns the keys without effect on the action -> where, and the remedy."""
    here = f"with action={config.action};"
    unused = {"data.answers": "in sage-data; action=regenerate writes the target's answers"}
    if config.action is not Action.check:
        unused |= dict.fromkeys(("shown", "own"), f"{here} remove it")
        unused |= {"limit": f"{here} data.num_examples=N selects a part of the data"}
    if config.action is not Action.regenerate:
        ranks, answers = f"{here} ranks are for action=regenerate", f"{here} it is for action=regenerate"
        return unused | {"launch.": ranks, "regenerate.": answers}
    unused |= dict.fromkeys(launch_keys("gpus", "ranks", "device", "threads"), f"{here} remove it")
    return unused | (WITH_SERVER if config.regenerate.server else WITHOUT_SERVER)


def check(config: DataCommand) -> None:
    """Checks the configuration; ConfigError or ValueError with key, value and what is allowed."""
    validate(config.data)
    check_paths(config.data)
    check_path("target.path", config.target.path)
    if config.action is not Action.check and not config.out.endswith(".jsonl"):
        raise ConfigError(f"out={config.out}: {config.action} writes rows; give out=FILE.jsonl")
    if config.action is Action.check and config.out and not config.out.endswith(".html"):
        raise ConfigError(f"out={config.out}: check writes a page; give out=FILE.html")
    check_server(config.regenerate, os.environ)
    check_ranges(config)
    if config.regenerate.draft:
        find_draft(config.regenerate.draft, "regenerate.draft")


def _regenerate(config: DataCommand) -> int:
    """Does this rank's part; RankFailed after a signal, at any point: an incomplete row is ignored."""
    from transformers.utils import logging as transformers_logging

    from data_prep.server.answers import ServedTarget
    from data_prep.tools import actions
    from data_prep.tools.regenerate import has_answers

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    settings, out = config.regenerate, Path(config.out)
    try:
        with StopFlag():
            target, draft = (ServedTarget.load(config.target.path), None) if settings.server else _load_models(config)
            where = (str(config.split), out, cluster_env.rank(), cluster_env.world_size())
            result = actions.regenerate_data(config.data, target, draft, settings, *where, key=read_key(settings, os.environ))
    except KeyboardInterrupt as error:
        if not has_answers(out):
            raise RankFailed(f"{NOTHING_SAVED} to {out}", EXIT_INTERRUPTED) from error
        kept = f"stopped; finished answers are kept beside {out}, and the same command continues"
        raise RankFailed(kept, EXIT_STOPPED) from error
    if result.is_merged:
        print(result.as_text(out))
    return EXIT_DONE


def _load_models(config: DataCommand) -> tuple[Any, Any]:
    """Returns the target, and the draft if there is one, on the device of this rank."""
    import torch

    import sage
    from train.launch.ranks import pick_device

    if config.launch.threads is not None:
        torch.set_num_threads(config.launch.threads)
    device = pick_device(str(config.launch.device), cluster_env.local_rank())
    target, draft = config.target.load(device), config.regenerate.draft
    return target, sage.load_draft(draft, target) if draft else None


if __name__ == "__main__":
    main()

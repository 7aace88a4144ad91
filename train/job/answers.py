"""The training data of a run with `data.answers=target`: the target answers the prompts first, on all ranks of the run.

Each rank answers its share of the conversations (with a sharded target or a server, rank 0 answers all) and waits for the rest.
"""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from typing import Any

import torch

import sage
from data_prep.config import Answers, DataConfig, read_key
from data_prep.dialog import Drive, own_answers
from data_prep.server.answers import ServedTarget, ServerAnswers
from data_prep.server.client import MediaPolicy
from data_prep.sources.base import Split
from data_prep.tools.regenerate import TargetAnswers, origin_of, weights_digest
from sage.commands.cli import EXIT_STOPPED
from sage.io.files import locked
from train.config.schema import Config, ConfigError
from train.engine.sharded_teacher import ShardedTarget
from train.launch.ranks import Ranks, blind_ranks
from train.launch.supervisor import RankFailed

logger = logging.getLogger(__name__)
WAITING = (
    "data.answers=target: another process generates the same answers and holds {lock}; waiting until it is done, then training "
    "on its answers. If it is stopped, they are completed here; another data.cache_dir generates them without waiting"
)


def training_data(config: Config, target: sage.Target, sharded: ShardedTarget | None, ranks: Ranks) -> DataConfig:
    """Returns the data settings of the training split; generates the target's answers if they are configured and missing.

    Collective. RankFailed after a signal if an answer was saved; ValueError if the ranks do not share the cache folder, no
    conversation was answered, or a server cannot be used.
    """
    if config.data.answers is Answers.given:
        return config.data
    settings = config.regenerate
    weights = weights_digest(config.target.path, getattr(target.model.config, "_commit_hash", None))
    assert target.processor is not None
    answers = TargetAnswers(config.data, target.processor, origin_of(target, settings), weights, settings)
    if all(ranks.gather(answers.is_complete)):
        logger.info("the target's own answers are kept in %s", answers.folder)
    else:
        if blind := blind_ranks(ranks, answers.folder):
            hosts = ", ".join(dict.fromkeys(blind.values()))
            raise ConfigError(
                f"data.cache_dir={answers.folder.parents[1]}: not shared with {hosts}, so that the ranks' answers cannot be "
                "joined; give a folder on a file system of all nodes, or copy finished answers to each"
            )
        logger.info("the target answers the training data first; the answers are kept in %s", answers.folder)
        lock = locked(answers.folder, "another data.cache_dir", WAITING) if ranks.is_main else nullcontext()
        try:
            with lock:
                ranks.wait_for_all()  # for the lock
                with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
                    _generate(config, target, sharded, ranks, answers)
                ranks.wait_for_all()
        except KeyboardInterrupt as error:
            if not answers.has_any:
                raise
            kept = f"finished answers are kept in {answers.folder}, and the same command continues"
            raise RankFailed(f"stopped while the target answered the data; {kept}", EXIT_STOPPED) from error
    return answers.data()


def _generate(config: Config, target: sage.Target, sharded: ShardedTarget | None, ranks: Ranks, answers: TargetAnswers) -> None:
    settings = config.regenerate
    if settings.server:
        if not ranks.is_main:
            return
        assert target.processor is not None
        served = ServedTarget(config.target.path, target.fingerprint, target.processor)
        policy = MediaPolicy.of(config.data, Split.train, settings.images)
        with ServerAnswers(settings, read_key(settings, os.environ), served, policy) as servers:
            _answer(answers, servers.drive, 0, 1, served_model=servers.check())
    elif sharded is not None and not ranks.is_main:
        sharded.follow()
    else:
        rank, world_size = (ranks.rank, ranks.world_size) if sharded is None else (0, 1)
        with nullcontext() if sharded is None else sharded.leading():
            draft = sage.load_draft(settings.draft, target) if settings.draft else None
            drive = own_answers(target, draft, settings, config.data.num_frames, len(answers) // world_size)
            _answer(answers, drive, rank, world_size)


def _answer(answers: TargetAnswers, drive: Drive, rank: int, world_size: int, **origin: Any) -> None:
    for file, result in answers.generate(drive, rank, world_size, **origin):
        if result.is_merged:
            logger.log(logging.WARNING if result.num_skipped else logging.INFO, "%s", result.as_text(file))

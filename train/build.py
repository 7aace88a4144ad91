"""The composition root: configuration -> objects. The only place that maps names to constructors.

Everything a mistake could be found in is built before the run folder is touched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers.utils.logging import disable_progress_bar

import sage
from checkpoints.store import StateStore, write_text
from data_prep import StepLoader, build_dataset
from data_prep import prompts as held_out_prompts
from train.checks import RUN_MARK, check_batch
from train.config import Config, ConfigError, DraftConfig, EagleDraftConfig, ImageInputs
from train.engine import Engine
from train.handoff import validate_draft
from train.loop import Run
from train.meter import Meter
from train.objective import Objective
from train.progress import open_display
from train.provenance import write_provenance
from train.ranks import Ranks
from train.resume import TrainState, load_state, seed_everything, state_folder
from train.schedule import total_steps
from train.teacher import Teacher
from train.tracking import Tracker, check_tracking, open_tracker
from train.validate import DTYPES, build_runners

logger = logging.getLogger(__name__)


@contextmanager
def building(config: Config, ranks: Ranks) -> Iterator[Run]:
    """A run ready to go; its sinks and its engine are closed at the end, whatever happens.

    Raises:
        ValueError: target, draft, data, policies or the state to resume from do not fit; nothing was written.
    """
    disable_progress_bar()  # transformers' own, one per model file; ours says what is going on
    set_threads(config, ranks)
    seed_everything(config.seed, ranks.rank)
    check_tracking(config)
    accumulation = check_batch(config, ranks.world_size)
    target = build_target(config, ranks)
    draft = build_draft(config, target)
    prompts = prepare_prompts(config, target, draft) if ranks.is_main else []
    assert target.processor is not None
    dataset = build_dataset(config.data, target.processor, "train")
    loader = partial(build_loader, config, ranks, dataset, target)
    steps = total_steps(config, loader(0).steps_per_epoch)
    store = StateStore(state_folder(config.run.dir), config.train.keep_last)
    _announce(config, ranks, draft, steps, accumulation, len(prompts))
    engine = Engine(draft, config, ranks, accumulation)
    try:
        state = load_state(store, engine, ranks) if config.run.resume else TrainState()
        tracker = open_run_folder(config, ranks, target, dataset.fingerprint, state)
        display = open_display(steps, state.step, config.train.log_interval_s, ranks.is_main)
        feed = loader(state.step)
        try:
            yield Run(
                config=config,
                ranks=ranks,
                engine=engine,
                teacher=Teacher(target, str(getattr(config.draft, "image_inputs", ImageInputs.embed))),
                objective=build_objective(config),
                loader=feed,
                store=store,
                tracker=tracker,
                display=display,
                meter=Meter(feed, state.tokens),
                state=state,
                total_steps=steps,
                validate=partial(validate_draft, prompts=prompts),
            )
        finally:
            display.close()
            tracker.close()
    finally:
        engine.close()


def build_target(config: Config, ranks: Ranks) -> sage.Target:
    """The frozen target, whole on this rank's device."""
    options = {"revision": config.target.revision} if config.target.revision is not None else {}
    return sage.load_target(config.target.path, dtype=DTYPES[config.target.dtype], device=ranks.device, **options)


def build_draft(config: Config, target: sage.Target) -> Any:
    """A draft in float32: loaded from `draft.path`, or fresh from `seed`, the same on every rank.

    Raises:
        ValueError: `draft.path` holds no draft, one of another kind, or one made for another target.
    """
    chosen = config.draft
    if chosen.path is None:
        draft: Any = sage.new_draft(target, str(chosen.kind), seed=config.seed, **draft_options(chosen))
    else:
        draft = sage.load_draft(chosen.path, target, dtype=torch.float32)
        if draft.config.model_type != f"sage_{chosen.kind}":
            raise ConfigError(
                f"draft.path={chosen.path}: holds a {draft.config.model_type}, but draft={chosen.kind} is asked for"
            )
    return draft.float().train().requires_grad_(True)


def draft_options(chosen: DraftConfig) -> dict[str, Any]:
    """What `sage.new_draft` takes: the kind's own fields that are set."""
    assert isinstance(chosen, EagleDraftConfig), chosen
    own = {key: value for key, value in asdict(chosen).items() if key not in ("kind", "path") and value is not None}
    return {**own, "image_inputs": str(chosen.image_inputs)}


def build_objective(config: Config) -> Objective:
    """The loss."""
    chosen = config.objective
    return Objective(
        ce_weight=chosen.ce_weight,
        feature_weight=chosen.feature_weight,
        smooth_l1_beta=chosen.smooth_l1_beta,
        chunk_tokens=chosen.chunk_tokens,
    )


def build_loader(config: Config, ranks: Ranks, dataset: Any, target: sage.Target, start_step: int) -> StepLoader:
    """This rank's micro-batches from `start_step` on."""
    assert target.processor is not None
    return StepLoader(
        dataset,
        target.processor.collate,
        config.train.global_batch_size,
        config.train.micro_batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=config.seed,
        start_step=start_step,
        num_workers=config.data.num_workers,
    )


def prepare_prompts(config: Config, target: sage.Target, draft: Any) -> list[Any]:
    """Held-out prompts; policies and their options are tried as well, so that a typo shows before training, not after."""
    build_runners(config.decode, target, draft)
    return held_out_prompts(config.data, "validation", config.decode.num_prompts)


def open_run_folder(config: Config, ranks: Ranks, target: sage.Target, data_fingerprint: str, state: TrainState) -> Tracker:
    """Writes config.yaml and provenance.json and opens the sinks, on rank 0."""
    if not ranks.is_main:
        return Tracker()
    folder = Path(config.run.dir)
    text = OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)
    resolved = OmegaConf.to_container(OmegaConf.create(text))
    write_text(folder / RUN_MARK, text)
    write_provenance(folder, ranks, target, data_fingerprint, state.step)
    assert isinstance(resolved, dict)
    return open_tracker(config, {str(key): value for key, value in resolved.items()}, state.step)


def set_threads(config: Config, ranks: Ranks) -> None:
    """Threads per rank: `launch.threads`, else the cores shared out among the ranks of this machine on a CPU."""
    if config.launch.threads is not None:
        torch.set_num_threads(config.launch.threads)
    elif ranks.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))


def _announce(config: Config, ranks: Ranks, draft: Any, steps: int, accumulation: int, prompts: int) -> None:
    millions = sum(p.numel() for p in draft.parameters()) / 1e6
    split = f"{ranks.world_size} rank(s) x {config.train.micro_batch_size} x {accumulation}"
    logger.info("%s: %s draft of %.2fM parameters for %s", config.run.dir, config.draft.kind, millions, config.target.name)
    logger.info("%d steps of %d = %s, ZeRO %d", steps, config.train.global_batch_size, split, config.deepspeed.stage)
    logger.info("%s on %s, %d held-out prompts", config.train.precision, ranks.device.type, prompts)

"""The composition root: configuration -> objects. The only place that maps names to constructors.

Everything a mistake could be found in is built before the run folder is touched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers.utils.logging import disable_progress_bar

import sage
from checkpoints.files import tidy
from checkpoints.run_folder import CONFIG as RUN_CONFIG
from checkpoints.run_folder import state_folder
from checkpoints.store import StateStore, saving
from data_prep import StepLoader, build_dataset
from data_prep import prompts as held_out_prompts
from sage.drafts.options import ImageInputs
from sage.files import write_text
from train.config.checks import check_batch
from train.config.schema import Config
from train.distill.build import build_student
from train.distill.student import Student
from train.distill.teacher import Teacher
from train.engine.engine import Engine
from train.engine.lr_schedule import total_steps
from train.engine.sharded_teacher import Shards, load_sharded
from train.launch.ranks import Ranks
from train.monitor.acceptance_estimate import chain_depth
from train.monitor.metrics import Meter
from train.monitor.profiler import ProfileWindow
from train.monitor.progress import open_display
from train.monitor.sinks import Tracker, check_tracking, open_tracker
from train.run.loop import Run
from train.state.provenance import write_provenance
from train.state.resume import TrainState, load_state, seed_everything
from train.state.same_data import check_same_data, data_content
from train.validation.in_loop import all_ranks_decode, validate_draft
from train.validation.validate import DTYPES, bench_prompt, build_policies, build_runners

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
    build_policies(config.decode)
    accumulation = check_batch(config, ranks.world_size)
    target, shards = build_target(config, ranks)
    assert target.processor is not None
    dataset = build_dataset(config.data, target.processor, "train")
    student = build_student(config, target, dataset, ranks)
    prompts = prepare_prompts(config, target, student.decoding_draft, ranks)
    loader = partial(build_loader, config, ranks, dataset, target)
    steps = total_steps(config, loader(0).steps_per_epoch)
    store = StateStore(state_folder(config.run.dir), config.train.keep_last, config.train.keep_every)
    _announce(config, ranks, student, steps, accumulation, len(prompts))
    engine = Engine(student, config, ranks, accumulation)
    is_well = False
    try:
        state = restore(config, store, engine, ranks, dataset)
        tracker = open_run_folder(config, ranks, target, dataset.fingerprint, state)
        display = open_display(steps, state.step, config.train.log_interval_s, ranks.is_main)
        feed = loader(state.step)
        profiling = ProfileWindow(config.run.dir, config.train.profile, ranks.rank)
        try:
            yield Run(
                config=config,
                ranks=ranks,
                engine=engine,
                teacher=build_teacher(config, target, student),
                shards=shards,
                loader=feed,
                store=store,
                tracker=tracker,
                display=display,
                meter=Meter(feed, state.tokens, chain_depth(config.decode)),
                state=state,
                total_steps=steps,
                validate=partial(validate_draft, prompts=prompts),
                profile=profiling,
            )
            is_well = True
        finally:
            profiling.close()
            display.close()
            tracker.close()
    finally:
        if is_well or ranks.world_size == 1:  # else it could wait for ranks that are gone
            engine.close()


def restore(config: Config, store: StateStore, engine: Engine, ranks: Ranks, dataset: Any) -> TrainState:
    """How far the run had come, restored into engine and generators; of a new run its beginning.

    Raises:
        ValueError: every state is damaged, or it is another draft's, or the data has changed since.
    """
    state = load_state(store, engine, ranks) if config.run.resume else TrainState()
    content = ranks.share(data_content(config, dataset) if ranks.is_main else None)
    check_same_data(config, state.data, content)
    state.data = content
    return state


def build_target(config: Config, ranks: Ranks) -> tuple[sage.Target, Shards | None]:
    """The frozen target on this rank's device: whole, or in parts that take all ranks to run."""
    chosen = config.target
    options = {"revision": chosen.revision} if chosen.revision is not None else {}
    load = partial(sage.load_target, chosen.path, dtype=DTYPES[chosen.dtype], device=ranks.device, **options)
    if not config.deepspeed.shard_target:
        return load(), None
    shards = load_sharded(load, config, ranks)
    return shards.target, shards


def build_teacher(config: Config, target: sage.Target, student: Student) -> Teacher:
    """The target, handing out what this student reads."""
    image_inputs = str(getattr(config.draft, "image_inputs", ImageInputs.embed))
    return Teacher(target, image_inputs, student.levels, student.token_map)


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
        length_window=config.train.length_window,
    )


def prepare_prompts(config: Config, target: sage.Target, draft: Any, ranks: Ranks) -> list[Any]:
    """Held-out prompts, on the ranks that decode; empty on the others.

    Prompts are prepared once, the runners built as well, so that a mistake shows before training, not after.
    """
    prompts = []
    if ranks.is_main:
        build_runners(config.decode, target, draft)
        prompts = held_out_prompts(config.data, "validation", config.decode.num_prompts)
        for index, prompt in enumerate(prompts):
            bench_prompt(target, prompt, index)
    return list(ranks.share(prompts)) if all_ranks_decode(config, ranks) else prompts


def open_run_folder(config: Config, ranks: Ranks, target: sage.Target, data_fingerprint: str, state: TrainState) -> Tracker:
    """Writes config.yaml and provenance.json and opens the sinks, on rank 0.

    Raises:
        SaveFailed: the folder cannot be written.
    """
    if not ranks.is_main:
        return Tracker()
    folder = Path(config.run.dir)
    text = OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)
    resolved = OmegaConf.to_container(OmegaConf.create(text))
    with saving(folder, then="start again"):
        tidy(folder)
        write_text(folder / RUN_CONFIG, text)
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


def _announce(config: Config, ranks: Ranks, student: Student, steps: int, accumulation: int, prompts: int) -> None:
    size = f"{sum(p.numel() for p in student.draft.parameters() if p.requires_grad) / 1e6:.2f}M"
    split = f"{ranks.world_size} rank(s) x {config.train.micro_batch_size} x {accumulation}"
    target = Path(config.target.path).name
    logger.info("%s: %s draft, %s parameters to train, for %s", config.run.dir, config.draft.kind, size, target)
    logger.info("%d steps of %d = %s, ZeRO %d", steps, config.train.global_batch_size, split, config.deepspeed.stage)
    logger.info("%s on %s, %d held-out prompts", config.train.precision, ranks.device.type, prompts)

"""The composition root: builds the objects of a run from its configuration, all of them before the run folder is written."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import nn
from transformers.utils.logging import disable_progress_bar

import sage
from checkpoints.export.serving import serving_line
from checkpoints.run_folder import CONFIGS, is_run, locked_run, next_config, read_reports, state_folder
from checkpoints.store import StateStore, saving
from data_prep.build import build_dataset, check_rows, long_examples
from data_prep.build import prompts as held_out_prompts
from data_prep.config import DROPPED, MAX_DROPPED
from data_prep.dataset.dataset import measure_preparation
from data_prep.loader import StepLoader
from data_prep.workers import loader_workers
from sage.drafts.registry import ImageInputs
from sage.io.dtypes import torch_dtype
from sage.io.files import write_text
from sage.io.folders import remove_leftovers
from sage.io.machine import num_cores
from sage.planning.base import Policy
from train.config.checks import check_run_folder
from train.config.derived import RunLength, repetition_line, run_length, split_text, validation_line, zero_stage
from train.config.resuming import changes
from train.config.schema import Config
from train.distill.build import build_student
from train.distill.compiled_layers import target_layers
from train.distill.own_answers import OwnAnswers
from train.distill.student import Student
from train.distill.teacher import Staging, Teacher
from train.engine.engine import Engine
from train.engine.sharded_teacher import ShardedTarget, load_sharded
from train.job.answers import training_data
from train.job.loop import TrainingRun
from train.job.schedule import RunSchedule
from train.launch import cluster_env
from train.launch.ranks import Ranks, RunDisk, check_same
from train.launch.supervisor import StopFlag
from train.monitor.metrics import TrainingMetrics, chain_depth
from train.monitor.profiler import ProfileWindow
from train.monitor.progress import Display, open_display
from train.monitor.sinks import Tracker, open_tracker
from train.state.provenance import write_provenance
from train.state.resume import TrainState, check_same_data, check_space, fingerprint_data, load_state, seed_everything
from train.validation.in_loop import DecodeShard, InLoopValidation, all_ranks_decode, shard_prompts
from train.validation.prompts import PromptSet
from train.validation.validate import build_policies, check_assistant

logger = logging.getLogger(__name__)


@contextmanager
def building(config: Config, ranks: Ranks, stop: StopFlag | None = None) -> Iterator[TrainingRun]:
    """Builds a run, in which `stop` requests a stop; closes its sinks and its engine at the end, also after an error.

    ValueError if a model, data, policy or state does not fit, or another process trains in the folder; nothing is written.
    """
    disable_progress_bar()  # of transformers, one per model file
    set_threads(config, ranks)
    seed_everything(config.seed, ranks.rank)
    linear = nn.functional.linear
    inputs = build_inputs(config, ranks)
    target, loader, stop = inputs.target, inputs.loader, stop or StopFlag()
    length = run_length(config, loader.steps_per_epoch)
    store = StateStore(state_folder(config.run.dir), config.train.keep_last, config.train.keep_every)
    _log_run(config, ranks, inputs, length)
    with ExitStack() as stack:
        stack.callback(setattr, nn.functional, "linear", linear)  # ZeRO stage 3 replaces it for the whole process
        if ranks.is_main:
            stack.enter_context(locked_run(Path(config.run.dir)))
            check_folder(config, length, inputs.student.draft)
        engine = Engine(inputs.student, config, ranks, loader.accumulation, bool(inputs.target.quantization))
        # After an error the engine is closed only with one rank, since closing could wait for ranks that have exited.
        stack.push(lambda error, *_: engine.close() if error is None or ranks.world_size == 1 else None)
        disk = RunDisk.of(ranks, Path(config.run.dir))
        state = load_state(store, engine, disk) if config.run.resume else TrainState()
        fingerprints = ranks.broadcast(fingerprint_data(config, loader.dataset) if ranks.is_main else None)
        check_same_data(config, state.data, fingerprints)
        state.data = fingerprints
        loader.start_step = state.step
        finished = is_finished(config, ranks, length, state)
        tracker, display, profile = open_outputs(stack, config, ranks, inputs, state, finished)
        disk.copy(Path(config.run.dir), Path(config.run.dir), CONFIGS)  # with which every node resumes
        shared: dict[str, Any] = {"config": config, "ranks": ranks, "engine": engine, "state": state, "stop": stop}
        shared |= {"tracker": tracker, "display": display}
        yield TrainingRun(
            **shared,
            teacher=build_teacher(config, target, inputs.student),
            loader=loader,
            store=store,
            metrics=TrainingMetrics(loader, state.tokens, chain_depth(config.decode)),
            length=length,
            validate=InLoopValidation(
                **shared, disk=disk, target=target, sharded=inputs.sharded, shard=inputs.shard, policies=inputs.policies
            ),
            profile=profile,
            own_answers=OwnAnswers(target, list(config.data.sources), length.steps, state.step),
            is_finished=finished,
            figures={DROPPED: inputs.dropped_share} if inputs.dropped_share else {},
        )


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """The loaded models and data of a run."""

    policies: dict[str, Policy]  # for validations; they have decoded nothing
    target: sage.Target  # frozen; its text layers are sharded over the ranks if `sharded` is not None
    sharded: ShardedTarget | None
    loader: StepLoader
    student: Student
    shard: DecodeShard  # the prompts that this rank decodes in validations
    dropped_share: float  # of the examples: longer than `data.max_length`, and dropped


def build_inputs(config: Config, ranks: Ranks) -> RunInputs:
    """Loads target, data, draft and prompts; what reveals a mistake soonest comes first."""
    policies = build_policies(config.decode)
    check_rows(config.data)
    target, sharded = build_target(config, ranks)
    assert target.processor is not None
    data = training_data(config, target, sharded, ranks)
    dataset = build_dataset(data, target.processor, "train")
    if (long := long_examples(data, dataset)) is not None:
        logger.log(logging.WARNING if long.num_long else logging.INFO, "%s", long.line())
        long.check(MAX_DROPPED)
    workers = loader_workers(config.data.num_workers, cluster_env.local_world_size())
    if ranks.is_main and (preparation := measure_preparation(dataset)) is not None:
        logger.info("%s", preparation.line(workers))
    student = build_student(config, target, dataset, ranks)
    loader = StepLoader(
        dataset,
        target.processor.collate,
        config.train.global_batch_size,
        config.train.micro_batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=config.seed,
        num_workers=workers,
        length_window=config.train.length_window,
        stage=Staging(target, ranks.device, torch.promote_types(target.dtype, torch_dtype(config.train.precision))),
        micro_batch_tokens=config.train.micro_batch_tokens,
    )
    check_same(ranks, "target.path", target.fingerprint)  # every rank works out the steps from the copy of its node
    if (lengths := loader.lengths) is not None:
        digest = hashlib.sha256(lengths.astype(np.int64).tobytes()).hexdigest()[:12]
        check_same(ranks, "data.path", f"{len(lengths):,} examples of {lengths.sum():,} tokens ({digest})")
    if line := loader.over_budget:
        logger.warning("%s", line)
    return RunInputs(
        policies=policies,
        target=target,
        sharded=sharded,
        loader=loader,
        student=student,
        shard=prepare_prompts(config, target, student.decoding_draft, ranks),
        dropped_share=0.0 if long is None else long.dropped_share,
    )


def check_folder(config: Config, length: RunLength, draft: nn.Module) -> None:
    """Refuses a locked run folder that has become a run in the meantime, or has no space for the states."""
    check_run_folder(config.run)
    trained = sum(weight.numel() for weight in draft.parameters() if weight.requires_grad)
    saved = sum(weight.numel() for weight in draft.state_dict().values()) * torch_dtype(config.train.precision).itemsize
    check_space(Path(config.run.dir), config.train, length.steps, trained, saved)


def is_finished(config: Config, ranks: Ranks, length: RunLength, state: TrainState) -> bool:
    """Whether a resumed run has neither a step left nor, with the decoding settings of its last launch, a validation."""
    if not config.run.resume or not RunSchedule(config.train, length).is_over(state, is_stopping=False):
        return False
    folder = Path(config.run.dir)
    has_report = ranks.is_main and state.step in dict(read_reports(folder))
    return bool(ranks.broadcast(has_report and not any(change.key.startswith("decode.") for change in changes(config))))


def build_target(config: Config, ranks: Ranks) -> tuple[sage.Target, ShardedTarget | None]:
    """Loads the frozen target to this rank's device, complete or sharded over all ranks."""
    load = partial(config.target.load, ranks.device)
    if not config.deepspeed.shard_target:
        return load(), None
    sharded = load_sharded(load, config, ranks)
    return sharded.target, sharded


def build_teacher(config: Config, target: sage.Target, student: Student) -> Teacher:
    """Builds the teacher with the features, embeddings and draft vocabulary that the student reads."""
    image_inputs = str(getattr(config.draft, "image_inputs", ImageInputs.embed))
    return Teacher(target, image_inputs, student.levels, student.token_map, target_layers(config, target))


def prepare_prompts(config: Config, target: sage.Target, draft: Any, ranks: Ranks) -> DecodeShard:
    """Loads the held-out prompts and prepares them on rank 0, so that a mistake is found before training."""
    held_out: list[Any] = []
    if ranks.is_main:
        check_assistant(config.decode, target, draft)
        held_out = held_out_prompts(config.data, "validation", config.decode.num_prompts)
    if all_ranks_decode(config, ranks):
        held_out = ranks.broadcast(held_out)
    prompts = PromptSet(target, config.decode, held_out)
    if ranks.is_main:
        prompts.prepare_first_turns()
    return shard_prompts(config, ranks, prompts)


def open_run_folder(config: Config, ranks: Ranks, target: sage.Target, data_fingerprint: str, state: TrainState) -> Tracker:
    """Writes configuration and provenance and opens the sinks, on rank 0; SaveFailed if the folder cannot be written."""
    folder = Path(config.run.dir)
    text = OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)
    resolved = OmegaConf.to_container(OmegaConf.create(text))
    changed = changes(config)
    with saving(folder, then="start again"):
        remove_leftovers(folder)
        if changed or not is_run(folder):
            write_text(next_config(folder, state.step), text)
        write_provenance(folder, ranks, target, data_fingerprint, state.step, {c.key: [c.before, c.now] for c in changed})
    assert isinstance(resolved, dict)
    return open_tracker(config, {str(key): value for key, value in resolved.items()}, state.step)


def open_outputs(
    stack: ExitStack, config: Config, ranks: Ranks, inputs: RunInputs, state: TrainState, is_finished: bool
) -> tuple[Tracker, Display, ProfileWindow]:
    """Opens what a run reports to until the stack is closed; a finished run writes and shows nothing."""
    fingerprint, is_shown = inputs.loader.dataset.fingerprint, ranks.is_main and not is_finished
    tracker = open_run_folder(config, ranks, inputs.target, fingerprint, state) if is_shown else Tracker()
    stack.enter_context(closing(tracker))
    display = stack.enter_context(closing(open_display(state.step, config.train.log_interval_s, is_shown)))
    profile = stack.enter_context(closing(ProfileWindow(config.run.dir, config.train.profile, ranks.rank)))
    return tracker, display, profile


def set_threads(config: Config, ranks: Ranks) -> None:
    """Sets the CPU threads of this rank: `launch.threads`, else OMP_NUM_THREADS, else the cores divided by the local ranks."""
    if config.launch.threads is not None:
        torch.set_num_threads(config.launch.threads)
    elif not cluster_env.has_own_threads(is_cpu=ranks.device.type == "cpu"):
        torch.set_num_threads(max(1, num_cores() // cluster_env.local_world_size()))


def _log_run(config: Config, ranks: Ranks, inputs: RunInputs, length: RunLength) -> None:
    size = f"{sum(p.numel() for p in inputs.student.draft.parameters() if p.requires_grad) / 1e6:.2f}M"
    split = split_text(config, ranks.world_size)
    target = Path(config.target.path).name
    logger.info("%s: %s draft, %s parameters to train, for %s", config.run.dir, config.draft.kind, size, target)
    logger.info("%s; batches of %d = %s, ZeRO %d", length, config.train.global_batch_size, split, zero_stage(config))
    logger.info("learning rate %g, %s", config.optim.lr, config.optim.schedule)
    logger.info("%s", serving_line(inputs.student.draft, inputs.target.model.config))
    logger.info("%s on %s, %d held-out prompt(s)", config.train.precision, ranks.device.type, inputs.shard.num_turns)
    for line in filter(None, (validation_line(config), repetition_line(config, inputs.loader.steps_per_epoch))):
        logger.info("%s", line)
    if compiled := ", ".join(filter(None, (str(target_layers(config, inputs.target)), str(inputs.student.layers)))):
        logger.info("compiled at their first pass: %s", compiled)

"""Checks of the configuration: the run folder, ranges of fields, then combinations of fields; without torch, models or data.

`check(config)` runs before anything is loaded or written. Properties of loaded objects (does the draft fit the target?) are
checked where these are built, still before the first file is written. Every check raises ConfigError for the first mistake:
dotted key, value, allowed values, remedy. Does not own: the settings of a run to be resumed (train.config.resuming).
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from checkpoints.run_folder import CONFIG, LOCK, is_run
from data_prep.config import Answers, check_paths, check_server
from data_prep.config import validate as check_data_fields
from data_prep.sources import KINDS as SOURCE_KINDS
from data_prep.sources.base import Split
from sage.drafts.location import find_draft
from sage.drafts.registry import KINDS, BlockOptions, TrainedPart
from sage.io.files import CannotWrite, check_writable
from sage.io.ranges import FieldError, check_fields
from sage.io.target_paths import how_to_get, looks_local, path_of_target
from sage.trees import AUTOREGRESSIVE, POLICIES
from train.config.derived import check_batch
from train.config.draft import CompressorKind
from train.config.resuming import check_same_run
from train.config.schema import (
    MAX_STAGE,
    Baseline,
    Compile,
    Config,
    ConfigError,
    DecodeConfig,
    Offload,
    OptimizerKind,
    Precision,
    RunConfig,
    Schedule,
    ValidateOn,
)
from train.config.store import sequences_per_pass, subschemas

# Sizes of a saved draft, which may not be changed.
SIZES = (
    *("intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("feature_levels", "draft_vocab_size", "num_layers", "mask_token"),
)


def check(config: Config) -> None:
    """Refuses a configuration that cannot be run; the checks of the data group raise ValueError."""
    if not config.launch.plan:  # a plan writes nothing and opens no data
        check_run_folder(config.run)
        check_same_run(config)
    check_data_fields(config.data)
    check_ranges(config)
    check_path("target.path", config.target.path)
    _check_draft(config)
    if not config.launch.plan:
        _check_data(config)
    _check_train(config)
    _check_objective(config)
    check_deepspeed(config, config.launch.gpus or config.launch.ranks or 1)
    _check_launch(config)
    check_decode(config.decode)
    _check_score(config)


def check_run_folder(run: RunConfig) -> None:
    """Refuses a run folder that would be overwritten or cannot be written."""
    folder = Path(run.dir)
    if not run.dir.strip():
        raise ConfigError("run.dir=: allowed: a folder; give run.dir=DIR")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.dir={folder}: allowed: a folder; this is a file, give another path")
    if is_run(folder) and not run.resume:
        raise ConfigError(f"run.dir={folder}: already holds a run; give run.resume=true to continue it, or another run.dir")
    if folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()) and not is_run(folder):
        raise ConfigError(f"run.dir={folder}: is not empty and holds no run; give a new or an empty folder")
    try:
        check_writable(folder / CONFIG)
    except CannotWrite as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise ConfigError(f"run.dir={folder}: cannot be written ({reason}); give a folder with write permission") from error


def check_ranges(config: Any) -> None:
    """Refuses the first value of a configuration that the annotation of its field does not allow."""
    try:
        check_fields(config)
    except FieldError as error:
        raise ConfigError(f"{error.key}={_shown(error.value)}: not allowed; {error.allowed}") from None


def check_path(key: str, path: str) -> None:
    """Refuses a local path that does not exist; `owner/name` may be a hub id, and a name of conf/target stands for its path."""
    path = path_of_target(path)
    if looks_local(path) and not Path(path).expanduser().is_dir():
        raise ConfigError(f"{key}={path}: no such folder; {how_to_get(path)}")


def check_decode(decode: DecodeConfig) -> None:
    """Checks the `decode` group of sage-train and sage-validate."""
    names = [str(name) for name in decode.policies]
    for name in (*names, *decode.options):
        if name not in POLICIES:
            _refuse("decode.policies", name, ", ".join(POLICIES), "remove or rename it")
    for name, options in decode.options.items():
        if not isinstance(options, dict):
            _refuse(f"decode.options.{name}", options, "a mapping of options", f"for example decode.options.{name}={{}}")
    if not names or len(set(names)) < len(names):
        _refuse("decode.policies", names, "one or more different names", "list each policy once")
    if decode.temperature == 0 and not decode.couple:
        _refuse("decode.couple", "false", "true at decode.temperature=0", "greedy decoding has no noise; set a temperature")
    if decode.assistant is not None:
        if Baseline.hf_assisted not in decode.baselines:
            raise ConfigError(f"decode.assistant={decode.assistant}: has no effect; add hf_assisted to decode.baselines")
        check_path("decode.assistant", decode.assistant)


def _check_draft(config: Config) -> None:
    if type(config.draft) is not subschemas().get(("draft", config.draft.kind)):
        _refuse("draft.kind", config.draft.kind, "the kind chosen by draft=KIND", "remove it")
    heads = getattr(config.draft, "num_attention_heads", None)
    kv_heads = getattr(config.draft, "num_key_value_heads", None)
    if heads and kv_heads and heads % kv_heads:
        _refuse("draft.num_key_value_heads", kv_heads, f"a divisor of draft.num_attention_heads={heads}", "change one of them")
    for name in SIZES:
        is_given = getattr(config.draft, name, None) is not None and getattr(type(config.draft), name) is None
        if config.draft.path is not None and is_given:
            _refuse(f"draft.{name}", getattr(config.draft, name), "null with draft.path", "a saved draft has its own")
    if config.draft.path is not None:
        find_draft(config.draft.path, "draft.path")
    levels = getattr(config.draft, "feature_levels", None)
    if levels is not None and (not levels or len(set(levels)) < len(levels)):
        allowed = "different layers counted from 0 (the embeddings)"
        _refuse("draft.feature_levels", levels, allowed, "drop it for low, middle, high")
    is_target = KINDS[config.draft.kind].is_target
    if is_target and config.draft.path is None and getattr(config.draft, "num_layers", None) is None:
        raise ConfigError(f"draft={config.draft.kind}: neither draft.path nor draft.num_layers is given; give one of them")
    chosen, kind = config.draft.compressor, config.draft.kind
    if not KINDS[kind].takes_compressor and chosen.kind is not CompressorKind.none:
        reader = "a smaller model" if is_target else "it"
        remedy = f"{reader} reads every visual token; remove it, or choose draft=eagle or draft=eagle3"
        _refuse("draft/compressor", chosen.kind, f"none with draft={kind}", remedy)
    if type(chosen) is not subschemas()[("draft/compressor", str(chosen.kind))]:
        raise ConfigError(f"draft.compressor.kind={chosen.kind}: has other keys; give draft/compressor={chosen.kind}")


def _check_data(config: Config) -> None:
    for label, source in config.data.resolved(Split.train).items():
        if "path" in SOURCE_KINDS[source.kind].options and not source.path:
            raise ConfigError(f"data.path: missing; data source {label} ({source.kind}) needs data.path=FILE_OR_FOLDER")
    check_paths(config.data)
    if config.data.answers is Answers.target:
        check_server(config.regenerate, os.environ)
        if config.regenerate.draft:
            find_draft(config.regenerate.draft, "regenerate.draft")


def _check_train(config: Config) -> None:
    train = config.train
    if train.patience and not train.validate_every:
        _refuse("train.patience", train.patience, "0 without train.validate_every", "give train.validate_every=STEPS")
    if train.profile is not None and not (len(train.profile) == 2 and train.profile[0] <= train.profile[1]):
        _refuse("train.profile", train.profile, "null or [first,last] step, counted from 1", "for example [10,12]")
    if train.deterministic and train.compile is Compile.layers:
        remedy = "kernels are chosen for the first batch after each start; remove one of them"
        _refuse("train.compile", train.compile, "auto or none with train.deterministic=true", remedy)
    optim = config.optim
    if optim.min_lr_ratio and optim.schedule is not Schedule.cosine:
        _refuse("optim.min_lr_ratio", optim.min_lr_ratio, "0 unless optim.schedule=cosine", "it would have no effect")
    if train.max_steps is not None and optim.warmup_steps >= train.max_steps:
        _refuse("optim.warmup_steps", optim.warmup_steps, f"below train.max_steps={train.max_steps}", "reduce it")
    if train.micro_batch_tokens is None:
        return
    if train.micro_batch_size != sequences_per_pass(config.target.recipe.micro_batch_size or 0, config.data.max_length):
        remedy = "the budget replaces it; give one of them"
        _refuse("train.micro_batch_size", train.micro_batch_size, "not given with train.micro_batch_tokens", remedy)
    for label, source in config.data.sources.items():
        if source.streaming:
            remedy = "the lengths of a stream are unknown; give train.micro_batch_size"
            where = f"null with data.sources.{label}.streaming=true"
            _refuse("train.micro_batch_tokens", train.micro_batch_tokens, where, remedy)


def _check_objective(config: Config) -> None:
    objective = config.objective
    weights = [term.name for term in fields(objective) if term.name.endswith("_weight")]
    if not any(getattr(objective, name) for name in weights):
        shown = ", ".join(f"objective.{name}=0" for name in weights)
        raise ConfigError(f"{shown}: nothing to train on; raise one of them")
    if not KINDS[config.draft.kind].predicts_features and objective.feature_weight:
        remedy = f"it predicts no feature of the target; choose objective={config.draft.kind}"
        _refuse("objective.feature_weight", objective.feature_weight, f"0 with draft={config.draft.kind}", remedy)
    for name, needed in (("steps", 1), ("feature_noise", 0), ("anchors", None)) if KINDS[config.draft.kind].is_target else ():
        if (value := getattr(objective, name)) != needed:
            remedy = "a model reads tokens alone; choose objective=model"
            _refuse(f"objective.{name}", value, f"{'null' if needed is None else needed} with draft=model", remedy)
    if hasattr(config.draft, "block_size") and objective.steps != 1:
        kind, remedy = config.draft.kind, "draft.block_size sets the levels, which one pass computes"
        _refuse("objective.steps", objective.steps, f"1 with draft={kind}", remedy)
    if isinstance(config.draft, BlockOptions) and not config.draft.is_causal and (config.draft.down_sample_ratio or 1) < 1:
        remedy = "slots attend to the later slots of their block; set draft.causal=true"
        _refuse("draft.down_sample_ratio", config.draft.down_sample_ratio, "1 with draft.causal=false", remedy)
    if objective.dpace_alpha is not None and not KINDS[config.draft.kind].is_parallel:
        remedy = "it weighs the levels of a block; remove it, or choose draft=block"
        _refuse("objective.dpace_alpha", objective.dpace_alpha, f"null with draft={config.draft.kind}", remedy)


def _check_score(config: Config) -> None:
    chosen = config.score.policy
    drafting = [name for name in config.decode.policies if name != AUTOREGRESSIVE]
    if chosen is not None and chosen not in drafting:
        _refuse(
            "score.policy", chosen, f"one of decode.policies that drafts: {', '.join(drafting)}", "measure it, or remove it"
        )
    if config.train.patience and not drafting:
        _refuse("train.patience", config.train.patience, "0 when no policy drafts", "add one to decode.policies")


def check_deepspeed(config: Config, world_size: int) -> None:
    """Checks the `deepspeed` group with this draft, validation and number of ranks."""
    deepspeed = config.deepspeed
    if deepspeed.offload_optimizer is not Offload.none and deepspeed.stage == 0:
        _refuse("deepspeed.offload_optimizer", deepspeed.offload_optimizer, "none with stage 0", "choose deepspeed=zero2")
    if config.optim.kind is OptimizerKind.muon:
        if deepspeed.stage == MAX_STAGE:
            _refuse("optim.kind", "muon", f"adamw with deepspeed.stage={MAX_STAGE}", "choose deepspeed=zero1 or zero2")
        if deepspeed.offload_optimizer is not Offload.none:
            allowed = f"adamw with deepspeed.offload_optimizer={deepspeed.offload_optimizer}"
            _refuse("optim.kind", "muon", allowed, "a draft's optimizer state is small: set deepspeed.offload_optimizer=none")
    derived = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
    if deepspeed.shard_target and config.decode.dtype not in (None, config.target.dtype):
        _refuse("decode.dtype", config.decode.dtype, "null with deepspeed.shard_target=true", "sharded weights cannot be cast")
    if deepspeed.shard_target and config.train.validate_on is ValidateOn.all:
        _refuse("train.validate_on", "all", "auto or main with deepspeed.shard_target=true", "every pass takes all ranks")
    for key in derived & set(deepspeed.extra):
        raise ConfigError(f"deepspeed.extra.{key}: derived from train.* and optim.*, so it may not be given here")
    if KINDS[config.draft.kind].is_target:
        _check_sharded_model(config, world_size)


def _check_sharded_model(config: Config, world_size: int) -> None:
    """A draft model runs its own vision tower, but not on a rank whose micro-batch has no image."""
    stage = config.deepspeed.stage
    if config.deepspeed.shard_target and config.draft.path is None:
        remedy = "layers are copied from an unsharded target; give draft.path=DIR, a smaller model's folder"
        _refuse("deepspeed.shard_target", "true", "false with draft=model and draft.num_layers", remedy)
    reason = "a rank without images would block the others"
    if world_size > 1 and stage and getattr(config.draft, "train_part", None) is TrainedPart.all:
        remedy = f"{reason}; choose deepspeed=zero0 or draft.train_part=text"
        _refuse("deepspeed.stage", stage, f"0 with draft=model draft.train_part=all on {world_size} ranks", remedy)
    if world_size > 1 and stage == MAX_STAGE:
        _refuse("deepspeed.stage", stage, f"0 to 2 with draft=model on {world_size} ranks", f"{reason}; choose deepspeed=zero2")


def _check_launch(config: Config) -> None:
    launch = config.launch
    if launch.gpus is not None and launch.ranks is not None and launch.gpus != launch.ranks:
        _refuse("launch.ranks", launch.ranks, f"the same as launch.gpus={launch.gpus}", "give one of them")
    if launch.device == "cpu" and config.train.precision is not Precision.fp32 and config.target.dtype is Precision.fp32:
        _refuse("train.precision", config.train.precision, "fp32 with target.dtype=fp32 on a CPU", "set both to fp32")
    check_batch(config, launch.gpus or launch.ranks or 1)


def _refuse(key: str, value: Any, allowed: str, remedy: str) -> NoReturn:
    raise ConfigError(f"{key}={_shown(value)}: allowed: {allowed}; {remedy}")


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)

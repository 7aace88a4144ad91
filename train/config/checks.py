"""Checks of the configuration: the run folder, ranges of fields, then combinations of fields; without torch, models or data.

`check(config)` runs before anything is loaded or written. Properties of loaded objects (does the draft fit the target?) are
checked where these are built, still before the first file is written. Every check raises ConfigError for the first mistake:
dotted key, value, allowed values, remedy.
"""

from __future__ import annotations

import os
from dataclasses import fields
from operator import attrgetter
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
from train.config import schema
from train.config.derived import check_batch
from train.config.resuming import check_same_run
from train.config.schema import MAX_STAGE, Config, ConfigError, ValidateConfig
from train.config.store import sequences_per_pass, subschemas

# Sizes of a saved draft, which may not be changed.
SIZES = (
    *("intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("feature_levels", "draft_vocab_size", "num_layers", "mask_token"),
)
DERIVED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


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
    check_decode(config)
    _check_score(config)


def check_run_folder(run: schema.RunConfig) -> None:
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


def check_decode(config: Config | ValidateConfig) -> None:
    """Checks the `decode` group of sage-train and sage-validate."""
    decode = config.decode
    for name, options in decode.options.items():
        if name not in POLICIES:
            raise ConfigError(f"decode.options.{name}: no such policy; allowed: {', '.join(POLICIES)}")
        if not isinstance(options, dict):
            _refuse(
                config, f"decode.options.{name}", "a mapping of options", f"for example decode.options.{name}={{}}", options
            )
    if not decode.policies or len(set(decode.policies)) < len(decode.policies):
        _refuse(config, "decode.policies", "one or more different names", "list each policy once")
    if decode.temperature == 0 and not decode.couple:
        remedy = "greedy decoding has no noise; set a temperature"
        _refuse(config, "decode.couple", "true at decode.temperature=0", remedy)
    if decode.assistant is not None:
        if schema.Baseline.hf_assisted not in decode.baselines:
            raise ConfigError(f"decode.assistant={decode.assistant}: has no effect; add hf_assisted to decode.baselines")
        check_path("decode.assistant", decode.assistant)


def _check_draft(config: Config) -> None:
    draft, kind = config.draft, KINDS[config.draft.kind]
    heads, kv_heads = (getattr(draft, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads and kv_heads and heads % kv_heads:
        _refuse(config, "draft.num_key_value_heads", f"a divisor of draft.num_attention_heads={heads}", "change one of them")
    if draft.path is not None:
        for name in SIZES:
            if getattr(draft, name, None) is not None and getattr(type(draft), name) is None:
                _refuse(config, f"draft.{name}", "null with draft.path", "a saved draft has its own")
        find_draft(draft.path, "draft.path")
    levels = getattr(draft, "feature_levels", None)
    if levels is not None and (not levels or len(set(levels)) < len(levels)):
        allowed = "different layers counted from 0 (the embeddings)"
        _refuse(config, "draft.feature_levels", allowed, "drop it for low, middle, high")
    if kind.is_target and draft.path is None and getattr(draft, "num_layers", None) is None:
        raise ConfigError(f"draft={draft.kind}: neither draft.path nor draft.num_layers is given; give one of them")
    compressor = draft.compressor.kind
    if not kind.takes_compressor and compressor != "none":
        reader = "a smaller model" if kind.is_target else "it"
        remedy = f"{reader} reads every visual token; remove it, or choose draft=eagle or draft=eagle3"
        _refuse(config, "draft/compressor", f"none with draft={draft.kind}", remedy, compressor)
    for group, chosen in (("draft", draft), ("draft/compressor", draft.compressor)):
        if type(chosen) is not subschemas().get((group, str(chosen.kind))):
            key = f"{group.replace('/', '.')}.kind"
            raise ConfigError(f"{key}={chosen.kind}: the choice has other keys; give {group}={chosen.kind}")


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
    train, optim = config.train, config.optim
    if train.patience and not train.validate_every:
        _refuse(config, "train.patience", "0 without train.validate_every", "give train.validate_every=STEPS")
    if train.profile is not None and not (len(train.profile) == 2 and train.profile[0] <= train.profile[1]):
        _refuse(config, "train.profile", "null or [first,last] step, counted from 1", "for example [10,12]")
    if train.deterministic and train.compile is schema.Compile.layers:
        remedy = "kernels are chosen for the first batch after each start; remove one of them"
        _refuse(config, "train.compile", "auto or none with train.deterministic=true", remedy)
    if optim.min_lr_ratio and optim.schedule is not schema.Schedule.cosine:
        _refuse(config, "optim.min_lr_ratio", "0 unless optim.schedule=cosine", "it would have no effect")
    if train.max_steps is not None and optim.warmup_steps >= train.max_steps:
        _refuse(config, "optim.warmup_steps", f"below train.max_steps={train.max_steps}", "reduce it")
    if train.micro_batch_tokens is None:
        return
    if train.micro_batch_size != sequences_per_pass(config.target.recipe.micro_batch_size or 0, config.data.max_length):
        remedy = "the budget replaces it; give one of them"
        _refuse(config, "train.micro_batch_size", "not given with train.micro_batch_tokens", remedy)
    for label, source in config.data.sources.items():
        if source.streaming:
            remedy = "the lengths of a stream are unknown; give train.micro_batch_size"
            _refuse(config, "train.micro_batch_tokens", f"null with data.sources.{label}.streaming=true", remedy)


def _check_objective(config: Config) -> None:
    objective, draft, kind = config.objective, config.draft, KINDS[config.draft.kind]
    weights = [term.name for term in fields(objective) if term.name.endswith("_weight")]
    if not any(getattr(objective, name) for name in weights):
        shown = ", ".join(f"objective.{name}=0" for name in weights)
        raise ConfigError(f"{shown}: nothing to train on; raise one of them")
    if not kind.predicts_features and objective.feature_weight:
        remedy = f"it predicts no feature of the target; choose objective={draft.kind}"
        _refuse(config, "objective.feature_weight", f"0 with draft={draft.kind}", remedy)
    for name, needed in (("steps", 1), ("feature_noise", 0), ("anchors", None)) if kind.is_target else ():
        if getattr(objective, name) != needed:
            allowed = f"{'null' if needed is None else needed} with draft=model"
            _refuse(config, f"objective.{name}", allowed, "a model reads tokens alone; choose objective=model")
    if hasattr(draft, "block_size") and objective.steps != 1:
        remedy = "draft.block_size sets the levels, which one pass computes"
        _refuse(config, "objective.steps", f"1 with draft={draft.kind}", remedy)
    if isinstance(draft, BlockOptions) and not draft.is_causal and (draft.down_sample_ratio or 1) < 1:
        remedy = "slots attend to the later slots of their block; set draft.causal=true"
        _refuse(config, "draft.down_sample_ratio", "1 with draft.causal=false", remedy)
    if objective.dpace_alpha is not None and not kind.is_parallel:
        remedy = "it weighs the levels of a block; remove it, or choose draft=block"
        _refuse(config, "objective.dpace_alpha", f"null with draft={draft.kind}", remedy)


def _check_score(config: Config) -> None:
    drafting = [name for name in config.decode.policies if name != AUTOREGRESSIVE]
    if config.score.policy is not None and config.score.policy not in drafting:
        allowed = f"one of decode.policies that drafts: {', '.join(drafting)}"
        _refuse(config, "score.policy", allowed, "measure it, or remove it")
    if config.train.patience and not drafting:
        _refuse(config, "train.patience", "0 when no policy drafts", "add one to decode.policies")


def check_deepspeed(config: Config, world_size: int) -> None:
    """Checks the `deepspeed` group with this draft, validation and number of ranks."""
    deepspeed = config.deepspeed
    is_offloaded = deepspeed.offload_optimizer is not schema.Offload.none
    if is_offloaded and deepspeed.stage == 0:
        _refuse(config, "deepspeed.offload_optimizer", "none with stage 0", "choose deepspeed=zero2")
    if config.optim.kind is schema.OptimizerKind.muon:
        if deepspeed.stage == MAX_STAGE:
            _refuse(config, "optim.kind", f"adamw with deepspeed.stage={MAX_STAGE}", "choose deepspeed=zero1 or zero2")
        if is_offloaded:
            allowed = f"adamw with deepspeed.offload_optimizer={deepspeed.offload_optimizer}"
            remedy = "a draft's optimizer state is small: set deepspeed.offload_optimizer=none"
            _refuse(config, "optim.kind", allowed, remedy)
    if deepspeed.shard_target and config.decode.dtype not in (None, config.target.dtype):
        _refuse(config, "decode.dtype", "null with deepspeed.shard_target=true", "sharded weights cannot be cast")
    if deepspeed.shard_target and config.target.quantize:
        _refuse(config, "target.quantize", "null with deepspeed.shard_target=true", "ZeRO does not shard quantized weights")
    if deepspeed.shard_target and config.train.validate_on is schema.ValidateOn.all:
        _refuse(config, "train.validate_on", "auto or main with deepspeed.shard_target=true", "every pass takes all ranks")
    for key in DERIVED:
        if key in deepspeed.extra:
            raise ConfigError(f"deepspeed.extra.{key}: derived from train.* and optim.*, so it may not be given here")
    if KINDS[config.draft.kind].is_target:
        _check_sharded_model(config, world_size)


def _check_sharded_model(config: Config, world_size: int) -> None:
    """A draft model runs its own vision tower, but not on a rank whose micro-batch has no image."""
    stage = config.deepspeed.stage
    if config.deepspeed.shard_target and config.draft.path is None:
        remedy = "layers are copied from an unsharded target; give draft.path=DIR, a smaller model's folder"
        _refuse(config, "deepspeed.shard_target", "false with draft=model and draft.num_layers", remedy)
    reason = "a rank without images would block the others"
    if world_size > 1 and stage and getattr(config.draft, "train_part", None) is TrainedPart.all:
        remedy = f"{reason}; choose deepspeed=zero0 or draft.train_part=text"
        _refuse(config, "deepspeed.stage", f"0 with draft=model draft.train_part=all on {world_size} ranks", remedy)
    if world_size > 1 and stage == MAX_STAGE:
        _refuse(
            config, "deepspeed.stage", f"0 to 2 with draft=model on {world_size} ranks", f"{reason}; choose deepspeed=zero2"
        )


def _check_launch(config: Config) -> None:
    launch = config.launch
    if launch.gpus is not None and launch.ranks is not None and launch.gpus != launch.ranks:
        _refuse(config, "launch.ranks", f"the same as launch.gpus={launch.gpus}", "give one of them")
    if (
        launch.device == "cpu"
        and config.train.precision is not schema.Precision.fp32
        and config.target.dtype is schema.Precision.fp32
    ):
        _refuse(config, "train.precision", "fp32 with target.dtype=fp32 on a CPU", "set both to fp32")
    check_batch(config, launch.gpus or launch.ranks or 1)


def _refuse(config: Config | ValidateConfig, key: str, allowed: str, remedy: str, value: Any = None) -> NoReturn:
    """Raises ConfigError for the `value` of a key, by default the configuration's."""
    value = attrgetter(key)(config) if value is None else value
    raise ConfigError(f"{key}={_shown(value)}: allowed: {allowed}; {remedy}")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)

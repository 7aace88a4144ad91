"""Every check that spans more than one field, in one place; nothing here needs torch, a model or the data.

`check(config)` runs before anything is loaded or written. What only a loaded part can know (whether a draft fits its
target, whether a policy takes an option) is checked where that part is built, still before the first file is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf

from checkpoints.run_folder import CONFIG as RUN_CONFIG
from checkpoints.run_folder import is_run
from data_prep.config import validate as check_data_fields
from data_prep.splits import Split
from sage.drafts.options import Eagle3Options, ModelOptions, TrainedPart
from sage.drafts.registry import KINDS
from sage.trees.names import AUTOREGRESSIVE
from train.config.draft import CompressorKind
from train.config.schema import (
    Baseline,
    Config,
    ConfigError,
    DecodeConfig,
    Offload,
    PolicyName,
    Precision,
    Schedule,
    ValidateOn,
    subschemas,
)

MAX_STAGE = 3
# What a saved draft brings along: sizes that may not be chosen again.
SIZES = (
    *("intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("feature_levels", "draft_vocab_size", "num_layers"),
)
# A resumed run goes on exactly; with one of these changed it would be another run. Prefixes of dotted keys.
BINDING = (
    *("seed", "target.path", "target.revision", "target.dtype", "draft.", "data.", "score."),
    *("train.global_batch_size", "train.precision", "train.length_window"),
)
FREE = ("data.num_workers", "data.bad_list")  # not data.cache: where lengths are known, batches are others


def check(config: Config) -> None:
    """Refuses a configuration that cannot be run.

    Raises:
        ConfigError: the first mistake found: dotted key, value, what is allowed, the remedy.
        ValueError: likewise, from the data's own checks.
    """
    if not config.launch.plan:  # a plan writes nothing and opens no data
        check_run_folder(config)
        check_same_run(config)
    check_path("target.path", config.target.path)
    if config.draft.path is not None:
        check_path("draft.path", config.draft.path)
    _check_draft(config)
    _check_data(config)
    _check_train(config)
    _check_optim(config)
    _check_objective(config)
    check_deepspeed(config, config.launch.gpus or config.launch.ranks or 1)
    _check_launch(config)
    check_decode(config.decode)
    _check_score(config)
    _at_least("seed", config.seed, 0)


def check_run_folder(config: Config) -> None:
    """An existing run is continued on purpose or not touched."""
    if not config.run.dir.strip():
        _refuse("run.dir", config.run.dir, "a folder", "give run.dir=DIR")
    folder = Path(config.run.dir)
    if folder.exists() and not folder.is_dir():
        _refuse("run.dir", folder, "a folder", "that is a file; give another path")
    if is_run(folder) and not config.run.resume:
        remedy = "give run.resume=true to go on with it, or another run.dir"
        raise ConfigError(f"run.dir={folder}: already holds a run; {remedy}")
    if folder.is_dir() and any(folder.iterdir()) and not is_run(folder):
        raise ConfigError(f"run.dir={folder}: is not empty and holds no run; give a new or an empty folder")
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"run.dir={folder}: {parent} cannot be written to; give a folder you may write to")


def check_same_run(config: Config) -> None:
    """A run that is resumed must be the run that was started, as far as its result depends on it."""
    path = Path(config.run.dir) / RUN_CONFIG
    if not path.exists():
        return
    try:
        saved = flat(OmegaConf.to_container(OmegaConf.load(path)))
    except Exception as error:  # PyYAML has a dozen error classes of its own
        raise ConfigError(f"{path}: cannot be read ({' '.join(str(error).split())}); give another run.dir") from error
    now = flat(OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.structured(config)))))
    for key in sorted(saved.keys() | now.keys()):
        if key.startswith(BINDING) and not key.startswith(FREE) and saved.get(key) != now.get(key):
            raise ConfigError(
                f"{key}={now.get(key)}: the run in {config.run.dir} was started with {saved.get(key)}; "
                f"resume with that, or start another run.dir"
            )


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings -> dotted keys."""
    if not isinstance(tree, dict) or not tree:
        return {prefix.rstrip("."): tree}
    return {key: value for name, part in tree.items() for key, value in flat(part, f"{prefix}{name}.").items()}


def check_path(key: str, path: str) -> None:
    """A path that can only be local must exist; `owner/name` may be a hub id."""
    is_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if is_local and not Path(path).expanduser().is_dir():
        raise ConfigError(f"{key}={path}: no such folder; give a local folder or a hub id like Qwen/Qwen2.5-VL-7B-Instruct")


def check_decode(decode: DecodeConfig) -> None:
    """What both commands need to know about decoding before a model is loaded."""
    names = [str(name) for name in decode.policies]
    for name in (*names, *decode.options):
        if name not in PolicyName.__members__:
            _refuse("decode.policies", name, ", ".join(PolicyName.__members__), "drop or rename it")
    for name, options in decode.options.items():
        if not isinstance(options, dict):
            _refuse(f"decode.options.{name}", options, "options by name", f"for example decode.options.{name}={{}}")
    if not names or len(set(names)) < len(names):
        _refuse("decode.policies", names, "one or more different names", "list each policy once")
    _at_least("decode.num_prompts", decode.num_prompts, 1)
    _at_least("decode.max_new_tokens", decode.max_new_tokens, 2)  # the prefill yields the first one
    _at_least("decode.repeats", decode.repeats, 1)
    _at_least("decode.warmup", decode.warmup, 0)
    _at_least("decode.top_k", decode.top_k, 0)
    _at_least("decode.temperature", decode.temperature, 0)
    if not 0 < decode.top_p <= 1:
        _refuse("decode.top_p", decode.top_p, "above 0, at most 1", "1.0 keeps the whole distribution")
    if decode.assistant is not None:
        if Baseline.hf_assisted not in decode.baselines:
            raise ConfigError(f"decode.assistant={decode.assistant}: has no effect; add hf_assisted to decode.baselines")
        check_path("decode.assistant", decode.assistant)


def _check_draft(config: Config) -> None:
    if type(config.draft) is not subschemas().get(("draft", config.draft.kind)):
        _refuse("draft.kind", config.draft.kind, "the kind of the choice", "give draft=KIND instead")
    for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads"):
        _at_least(f"draft.{name}", getattr(config.draft, name, None), 1)
    heads = getattr(config.draft, "num_attention_heads", None)
    kv_heads = getattr(config.draft, "num_key_value_heads", None)
    if heads and kv_heads and heads % kv_heads:
        _refuse("draft.num_key_value_heads", kv_heads, f"a divisor of draft.num_attention_heads={heads}", "change one")
    for name in SIZES:
        if config.draft.path is not None and getattr(config.draft, name, None) is not None:
            _refuse(f"draft.{name}", getattr(config.draft, name), "null with draft.path", "a saved draft brings its own")
    _check_compressor(config)
    if isinstance(config.draft, Eagle3Options):
        _check_eagle3(config.draft)
    if isinstance(config.draft, ModelOptions):
        _at_least("draft.num_layers", config.draft.num_layers, 1)
        if config.draft.path is None and config.draft.num_layers is None:
            raise ConfigError("draft=model: neither draft.path nor draft.num_layers is given; name a smaller model or a depth")


def _check_compressor(config: Config) -> None:
    chosen = config.draft.compressor
    if isinstance(config.draft, ModelOptions) and chosen.kind is not CompressorKind.none:
        remedy = "a smaller model reads every visual token; drop it, or choose draft=eagle or draft=eagle3"
        _refuse("draft/compressor", chosen.kind, "none with draft=model", remedy)
    if type(chosen) is not subschemas()[("draft/compressor", str(chosen.kind))]:
        raise ConfigError(f"draft.compressor.kind={chosen.kind}: brings other numbers; choose draft/compressor={chosen.kind}")
    for name in ("ratio", "conv_ratio", "queries"):
        _at_least(f"draft.compressor.{name}", getattr(chosen, name, None), 1)
    temperature = getattr(chosen, "temperature", 1.0)
    if not 0 < temperature < float("inf"):
        _refuse("draft.compressor.temperature", temperature, "above 0", "1.0 is the usual value")


def _check_eagle3(draft: Eagle3Options) -> None:
    _at_least("draft.draft_vocab_size", draft.draft_vocab_size, 1)
    levels = draft.feature_levels
    if levels is not None and (not levels or min(levels) < 0 or len(set(levels)) < len(levels)):
        _refuse(
            "draft.feature_levels", levels, "different layers counted from 0 (the embeddings)", "drop it for low, middle, high"
        )


def _check_data(config: Config) -> None:
    check_data_fields(config.data)
    if config.launch.plan:
        return
    for label, source in config.data.resolved(Split.train).items():
        needs_path = source.kind != "pocket"
        if needs_path and not source.path:
            raise ConfigError(f"data.path: missing; data source {label} ({source.kind}) needs data.path=FILE_OR_FOLDER")
        if source.path and source.path.startswith((".", "/", "~")) and not Path(source.path).expanduser().exists():
            raise ConfigError(f"data.path={source.path}: no such file or folder; data source {label} reads it")
        if source.media_root and not Path(source.media_root).expanduser().is_dir():
            raise ConfigError(f"data.media_root={source.media_root}: no such folder; relative picture paths start there")


def _check_train(config: Config) -> None:
    train = config.train
    if train.epochs is None and train.max_steps is None:
        raise ConfigError("train.epochs, train.max_steps: both null, so the run has no end; give one of them")
    for name in ("epochs", "max_steps", "global_batch_size", "micro_batch_size", "keep_last", "log_every", "length_window"):
        _at_least(f"train.{name}", getattr(train, name), 1)
    for name in ("save_every", "keep_every", "validate_every", "patience"):
        _at_least(f"train.{name}", getattr(train, name), 0)
    if train.patience and not train.validate_every:
        _refuse("train.patience", train.patience, "0 without train.validate_every", "give train.validate_every=STEPS")
    if train.profile is not None and not (len(train.profile) == 2 and 1 <= train.profile[0] <= train.profile[1]):
        _refuse("train.profile", train.profile, "null or [first,last] step, counted from 1", "for example [10,12]")
    _at_least("train.log_interval_s", train.log_interval_s, 0)


def check_batch(config: Config, world_size: int) -> int:
    """Micro-batches per rank and optimizer step, for a known number of ranks.

    Raises:
        ConfigError: the global batch does not split evenly.
    """
    per_pass = config.train.micro_batch_size * world_size
    if config.train.global_batch_size % per_pass:
        raise ConfigError(
            f"train.global_batch_size={config.train.global_batch_size}: not a multiple of train.micro_batch_size="
            f"{config.train.micro_batch_size} x {world_size} rank(s) = {per_pass}; change one of the three"
        )
    return config.train.global_batch_size // per_pass


def _check_optim(config: Config) -> None:
    optim = config.optim
    if not optim.lr > 0 or optim.lr == float("inf"):
        _refuse("optim.lr", optim.lr, "above 0", "SpecVLM uses 8e-5 for a 7B target")
    for name in ("beta1", "beta2", "min_lr_ratio"):
        value = getattr(optim, name)
        if not 0 <= value < 1:
            _refuse(f"optim.{name}", value, "from 0 to below 1", "see conf/optim")
    for name in ("eps", "weight_decay", "grad_clip", "warmup_steps"):
        _at_least(f"optim.{name}", getattr(optim, name), 0)
    if optim.min_lr_ratio and optim.schedule is not Schedule.cosine:
        _refuse("optim.min_lr_ratio", optim.min_lr_ratio, "0 unless optim.schedule=cosine", "it would have no effect")
    if config.train.max_steps is not None and optim.warmup_steps >= config.train.max_steps:
        _refuse("optim.warmup_steps", optim.warmup_steps, f"below train.max_steps={config.train.max_steps}", "shorten it")


def _check_objective(config: Config) -> None:
    objective = config.objective
    weights = [part.name for part in fields(objective) if part.name.endswith("_weight")]
    for name in (*weights, "feature_noise"):
        _at_least(f"objective.{name}", getattr(objective, name), 0)
    if not any(getattr(objective, name) for name in weights):
        shown = ", ".join(f"objective.{name}=0" for name in weights)
        raise ConfigError(f"{shown}: nothing to train on; raise one of them")
    for name, usual in (("smooth_l1_beta", "1.0"), ("temperature", "1.0"), ("step_decay", "0.8")):
        if not 0 < getattr(objective, name) < float("inf"):
            _refuse(f"objective.{name}", getattr(objective, name), "above 0", f"{usual} is the usual value")
    for name in ("chunk_tokens", "steps"):
        _at_least(f"objective.{name}", getattr(objective, name), 1)
    if not KINDS[config.draft.kind].predicts_features and objective.feature_weight:
        remedy = f"it predicts no feature of the target; choose objective={config.draft.kind}"
        _refuse("objective.feature_weight", objective.feature_weight, f"0 with draft={config.draft.kind}", remedy)
    if isinstance(config.draft, ModelOptions):
        remedy = "a model reads tokens alone; choose objective=model"
        if objective.steps != 1:
            _refuse("objective.steps", objective.steps, "1 with draft=model", remedy)
        if objective.feature_noise:
            _refuse("objective.feature_noise", objective.feature_noise, "0 with draft=model", remedy)


def _check_score(config: Config) -> None:
    chosen = config.score.policy
    drafting = [name for name in config.decode.policies if name != AUTOREGRESSIVE]
    if chosen is not None and chosen not in drafting:
        _refuse("score.policy", chosen, f"one of decode.policies that drafts: {', '.join(drafting)}", "measure it, or drop it")
    if config.train.patience and not drafting:
        _refuse("train.patience", config.train.patience, "0 when no policy drafts", "add one to decode.policies")


def check_deepspeed(config: Config, world_size: int) -> None:
    """What is spread over the ranks, for a known number of ranks.

    Raises:
        ConfigError: a stage or a switch that cannot be, or not together with this draft, validation or number of ranks.
    """
    deepspeed = config.deepspeed
    if not 0 <= deepspeed.stage <= MAX_STAGE:
        _refuse("deepspeed.stage", deepspeed.stage, "0, 1, 2 or 3", "choose deepspeed=zero0..zero3")
    if deepspeed.offload_optimizer is not Offload.none and deepspeed.stage == 0:
        _refuse("deepspeed.offload_optimizer", deepspeed.offload_optimizer, "none with stage 0", "choose deepspeed=zero2")
    _at_least("deepspeed.bucket_elements", deepspeed.bucket_elements, 1)
    derived = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
    if deepspeed.shard_target and config.decode.dtype not in (None, config.target.dtype):
        _refuse("decode.dtype", config.decode.dtype, "null with deepspeed.shard_target=true", "parts of weights are not cast")
    if deepspeed.shard_target and config.train.validate_on is ValidateOn.all:
        _refuse("train.validate_on", "all", "auto or main with deepspeed.shard_target=true", "every pass takes all ranks")
    for key in derived & set(deepspeed.extra):
        raise ConfigError(f"deepspeed.extra.{key}: derived from train.* and optim.*, so it may not be given here")
    if isinstance(config.draft, ModelOptions):
        _check_spread_model(config, config.draft, world_size)


def _check_spread_model(config: Config, draft: ModelOptions, world_size: int) -> None:
    """A model reads pictures with a vision tower of its own: not at all on a rank whose micro-batch has none."""
    stage = config.deepspeed.stage
    if config.deepspeed.shard_target and config.draft.path is None:
        remedy = "layers are copied from a whole target; give draft.path=DIR, a smaller model's folder"
        _refuse("deepspeed.shard_target", "true", "false with draft=model and draft.num_layers", remedy)
    waiting = "a rank without pictures would leave the others waiting"
    if world_size > 1 and stage and draft.train_part is TrainedPart.all:
        remedy = f"{waiting}; choose deepspeed=zero0 or draft.train_part=text"
        _refuse("deepspeed.stage", stage, f"0 with draft=model draft.train_part=all on {world_size} ranks", remedy)
    if world_size > 1 and stage == MAX_STAGE:
        _refuse(
            "deepspeed.stage", stage, f"0 to 2 with draft=model on {world_size} ranks", f"{waiting}; choose deepspeed=zero2"
        )


def _check_launch(config: Config) -> None:
    launch = config.launch
    for name in ("gpus", "ranks", "threads", "timeout_s"):
        _at_least(f"launch.{name}", getattr(launch, name), 1)
    for name in ("gpu_memory_gb", "gpu_tflops"):
        if not getattr(launch, name) > 0:
            _refuse(f"launch.{name}", getattr(launch, name), "above 0", "it describes one GPU")
    if launch.gpus is not None and launch.ranks is not None and launch.gpus != launch.ranks:
        _refuse("launch.ranks", launch.ranks, f"the same as launch.gpus={launch.gpus}", "give one of them")
    if launch.device == "cpu" and config.train.precision is not Precision.fp32 and config.target.dtype is Precision.fp32:
        _refuse("train.precision", config.train.precision, "fp32 with target.dtype=fp32 on a CPU", "set both alike")
    check_batch(config, launch.gpus or launch.ranks or 1)


def _at_least(key: str, value: float | None, lowest: int) -> None:
    if value is not None and not value >= lowest:
        _refuse(key, value, f"{lowest} or more", "change it")


def _refuse(key: str, value: Any, allowed: str, remedy: str) -> NoReturn:
    shown = ",".join(map(str, value)) if isinstance(value, Iterable) and not isinstance(value, str) else value
    raise ConfigError(f"{key}={shown}: allowed: {allowed}; {remedy}")

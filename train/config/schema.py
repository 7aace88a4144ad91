"""The typed configuration of a run: what Hydra composes is checked against these dataclasses and becomes one of them.

Owns: names, types, defaults that are the same for every choice of a group. Numbers that differ between choices live in
`conf/`. Cross-field checks are in `train.config.checks`; below the command line nobody sees a DictConfig.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from data_prep.config import DataConfig
from sage.drafts.registry import KINDS
from sage.trees.names import POLICIES
from train.config.draft import (
    CompressorConfig,
    ConcatConfig,
    DraftConfig,
    RatioConfig,
    ResamplerConfig,
    SelectConfig,
    draft_schema,
)


class ConfigError(ValueError):
    """A user's mistake in the configuration: one line that names key, value, what is allowed and the remedy."""


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"


class Schedule(StrEnum):
    constant = "constant"
    cosine = "cosine"


class Offload(StrEnum):
    none = "none"
    cpu = "cpu"


class TrackingKind(StrEnum):
    jsonl = "jsonl"
    tensorboard = "tensorboard"
    wandb = "wandb"


class WandbMode(StrEnum):
    online = "online"
    offline = "offline"


class ValidateOn(StrEnum):
    """Who decodes during training: rank 0, every rank its share of the prompts, or (`auto`) every rank where each has a GPU."""

    auto = "auto"
    main = "main"
    all = "all"


class ScoreMetric(StrEnum):
    """Which figure of a validation report is the score."""

    tokens_per_target_pass = "tokens_per_target_pass"
    speedup = "speedup"


PolicyName = StrEnum("PolicyName", {name: name for name in POLICIES})  # type: ignore[misc]


class Baseline(StrEnum):
    """What a Hugging Face user would run instead; measured beside the policies."""

    hf_generate = "hf_generate"
    hf_static_cache = "hf_static_cache"
    hf_prompt_lookup = "hf_prompt_lookup"
    hf_assisted = "hf_assisted"


@dataclass(kw_only=True)
class RunConfig:
    """The run folder. `dir` holds everything the run writes; with `resume` an interrupted run goes on where it stopped."""

    name: str = MISSING
    dir: str = MISSING
    resume: bool = False


@dataclass(kw_only=True)
class LaunchConfig:
    """Ranks on this machine. `gpus` and `ranks` are the same number; inside torchrun, deepspeed or srun both may stay unset.

    `timeout_s` bounds how long a rank waits for another; rank 0 validates alone meanwhile, so it is generous.
    With `plan` nothing is trained: what the run would need is printed, on GPUs of `gpu_memory_gb` (10^9 bytes) that sustain
    `gpu_tflops`.
    """

    gpus: int | None = None
    ranks: int | None = None
    device: Device = Device.auto
    timeout_s: int = 7200
    threads: int | None = None
    plan: bool = False
    gpu_memory_gb: float = 80.0
    gpu_tflops: float = 400.0


@dataclass(kw_only=True)
class TargetConfig:
    """The frozen vision-language model: a local folder or a hub id."""

    name: str = MISSING
    path: str = MISSING
    revision: str | None = None
    dtype: Precision = MISSING


@dataclass(kw_only=True)
class DeepspeedConfig:
    """The part of DeepSpeed's configuration a run chooses; batch sizes, precision and clipping are derived.

    `stage` shards the draft's training; `shard_target` shards the frozen target over the ranks (see `sharded_teacher`).
    `extra` goes into DeepSpeed's own dictionary as it is, for switches this schema does not name.
    """

    stage: int = MISSING
    overlap_comm: bool = False
    bucket_elements: int = 500_000_000
    offload_optimizer: Offload = Offload.none
    shard_target: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ObjectiveConfig:
    """Weights of the loss terms and the number of unrolled steps (see `train.distill.objective.Objective`).

    `<name>_weight` belongs to the term of that name in `train.distill.chunked_loss.TERMS`; `feature_weight` to SmoothL1 on the
    features. Logits exist for `chunk_tokens` positions at a time; `feature_noise` is the half-width of uniform noise on the
    input features.
    """

    ce_weight: float = MISSING
    feature_weight: float = MISSING
    tv_weight: float = 0.0
    lk_weight: float = 0.0
    steps: int = 1
    step_decay: float = 1.0
    temperature: float = 1.0
    smooth_l1_beta: float = 1.0
    feature_noise: float = 0.0
    chunk_tokens: int = 256


@dataclass(kw_only=True)
class OptimConfig:
    """AdamW. `grad_clip` 0 = none; `min_lr_ratio` is where the cosine ends, as a share of `lr`."""

    lr: float = MISSING
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Schedule = Schedule.constant
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    grad_clip: float = MISSING


@dataclass(kw_only=True)
class TrainConfig:
    """Length and rhythm of a run, in optimizer steps. With both `epochs` and `max_steps` the shorter one ends it.

    `patience` validations in a row without a better score end it early (0: never). The steps of `profile` = [first, last] are
    traced.

    Beside the `keep_last` newest states those of steps that are a multiple of `keep_every` stay (0: none), and that of the
    best draft.
    Within `length_window` optimizer steps examples are sorted by length, so that little of a batch is padding and ranks do not
    wait for one another; the order of the steps is shuffled again, and 1 leaves every step the examples it was drawn with.
    """

    epochs: int | None = None
    max_steps: int | None = None
    global_batch_size: int = MISSING
    micro_batch_size: int = MISSING
    precision: Precision = MISSING
    save_every: int = 0
    keep_last: int = 2
    keep_every: int = 0
    length_window: int = 16
    validate_every: int = 0
    validate_on: ValidateOn = ValidateOn.auto
    patience: int = 0
    profile: list[int] | None = None
    log_every: int = 10
    log_interval_s: float = 15.0


@dataclass(kw_only=True)
class DecodeConfig:
    """How a draft is measured. `options` holds what differs from a policy's own defaults, by policy name.

    `assistant` is the smaller model of the baseline `hf_assisted`; a smaller model as the draft is its own. `replay` also
    reports what every other policy would have achieved on the same drafts.
    """

    policies: list[PolicyName] = MISSING
    options: dict[str, Any] = field(default_factory=dict)
    baselines: list[Baseline] = field(default_factory=list)
    num_prompts: int = MISSING
    max_new_tokens: int = MISSING
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repeats: int = 1
    warmup: int = 1
    dtype: Precision | None = None
    assistant: str | None = None
    replay: bool = False


@dataclass(kw_only=True)
class ScoreConfig:
    """What a draft is judged by: which one is kept as `draft_best/`, when to stop early, what a sweep maximises.

    `policy` unset means `sage` where it is measured, else the first policy that drafts.
    """

    policy: PolicyName | None = None
    metric: ScoreMetric = ScoreMetric.tokens_per_target_pass


@dataclass(kw_only=True)
class TrackingConfig:
    """Where metrics go beside `metrics.jsonl`, which is always written."""

    kind: TrackingKind = TrackingKind.jsonl


@dataclass(kw_only=True)
class WandbConfig(TrackingConfig):
    kind: TrackingKind = TrackingKind.wandb
    project: str = "sage-draft"
    entity: str | None = None
    group: str | None = None
    mode: WandbMode = WandbMode.online


@dataclass(kw_only=True)
class Config:
    """Everything `sage-train` needs."""

    seed: int = 0
    debug: bool = False
    run: RunConfig = field(default_factory=RunConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(sources={}))
    deepspeed: DeepspeedConfig = field(default_factory=DeepspeedConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@dataclass(kw_only=True)
class DraftChoice:
    """Which saved draft: the name of one in the run's folder (`draft`, `draft_best`), or any folder."""

    path: str = "draft"


@dataclass(kw_only=True)
class ValidateConfig:
    """What `sage-validate` measures. For a run folder, whatever the command line leaves unsaid comes from its config.yaml.

    `checkpoint` is a run folder or a draft's own folder. `out` takes the place of the run folder that
    `validation/step_########/` is written to.
    """

    checkpoint: str | None = None
    draft: DraftChoice = field(default_factory=DraftChoice)
    out: str | None = None
    debug: bool = False
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(sources={}))
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)


_SUBSCHEMAS: dict[tuple[str, str], type] = {
    ("draft/compressor", "none"): CompressorConfig,
    ("draft/compressor", "prune"): RatioConfig,
    ("draft/compressor", "pool"): RatioConfig,
    ("draft/compressor", "conv"): RatioConfig,
    ("draft/compressor", "resampler"): ResamplerConfig,
    ("draft/compressor", "text_only"): CompressorConfig,
    ("draft/compressor", "weighted"): RatioConfig,
    ("draft/compressor", "concat"): ConcatConfig,
    ("draft/compressor", "select"): SelectConfig,
    ("tracking", "jsonl"): TrackingConfig,
    ("tracking", "tensorboard"): TrackingConfig,
    ("tracking", "wandb"): WandbConfig,
}


POLICY_GROUP = "decode/policy"


def subschemas() -> dict[tuple[str, str], type]:
    """(group, choice) -> schema, for groups whose choices have different keys."""
    return {("draft", name): draft_schema(kind) for name, kind in KINDS.items()} | _SUBSCHEMAS


def register() -> None:
    """Puts the schemas where `defaults` lists find them: the roots, the kinds of draft, and one per choice under `schema/`."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=Config)
    store.store(name="validate_schema", node=ValidateConfig)
    for name, kind in KINDS.items():  # a kind is a choice without a YAML file
        store.store(group="draft", name=name, node=draft_schema(kind))
    for (group, choice), schema in _SUBSCHEMAS.items():
        store.store(group=f"schema/{group}", name=choice, node=schema)
    for name in POLICIES:  # with the defaults of its class; options are added without `+`
        options = OmegaConf.create({}, flags={"struct": False})
        store.store(group=POLICY_GROUP, name=name, package="decode.options", node={name: options})


def config_dir() -> Path:
    """The folder of YAML files: `train/_conf` of an installed package, `conf/` of a checkout."""
    spec = importlib.util.find_spec("train._conf")
    if spec is not None and spec.submodule_search_locations:
        return Path(list(spec.submodule_search_locations)[0])
    return Path(__file__).resolve().parents[2] / "conf"

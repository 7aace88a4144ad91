"""The typed configuration of a run: what Hydra composes is checked against these dataclasses and becomes one of them.

Owns: names, types, defaults that are the same for every choice of a group. Numbers that differ between choices live in
`conf/`. Cross-field checks are in `train.checks`; below the command line nobody sees a DictConfig.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from data_prep.config import DataConfig


class ConfigError(ValueError):
    """A user's mistake in the configuration: one line that names key, value, what is allowed and the remedy."""


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"


class DraftKind(StrEnum):
    eagle = "eagle"


class ImageInputs(StrEnum):
    """What the draft sees at picture positions: the visual embedding or the placeholder token's."""

    embed = "embed"
    token = "token"


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


class PolicyName(StrEnum):
    """`sage.POLICIES`, spelt out here because asking `sage` would import torch (a test holds the two together)."""

    autoregressive = "autoregressive"
    chain = "chain"
    static = "static"
    eagle2 = "eagle2"
    spec_llava = "spec_llava"
    talon = "talon"
    ddd = "ddd"
    sage = "sage"
    cost_aware = "cost_aware"


class Baseline(StrEnum):
    """What a Hugging Face user would run instead; measured beside the policies."""

    hf_generate = "hf_generate"
    hf_static_cache = "hf_static_cache"
    hf_prompt_lookup = "hf_prompt_lookup"


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
    """

    gpus: int | None = None
    ranks: int | None = None
    device: Device = Device.auto
    timeout_s: int = 7200
    threads: int | None = None


@dataclass(kw_only=True)
class TargetConfig:
    """The frozen vision-language model: a local folder or a hub id."""

    name: str = MISSING
    path: str = MISSING
    revision: str | None = None
    dtype: Precision = MISSING


@dataclass(kw_only=True)
class DraftConfig:
    """What every draft has. `path` continues from a saved draft instead of fresh weights."""

    kind: DraftKind = MISSING
    path: str | None = None


@dataclass(kw_only=True)
class EagleDraftConfig(DraftConfig):
    """Sizes left unset follow the target (see `sage.new_draft`)."""

    kind: DraftKind = DraftKind.eagle
    input_norm: bool = True
    image_inputs: ImageInputs = ImageInputs.embed
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None


@dataclass(kw_only=True)
class DeepspeedConfig:
    """The part of DeepSpeed's configuration a run chooses; batch sizes, precision and clipping are derived.

    `extra` goes into DeepSpeed's own dictionary as it is, for switches this schema does not name.
    """

    stage: int = MISSING
    overlap_comm: bool = False
    bucket_elements: int = 500_000_000
    offload_optimizer: Offload = Offload.none
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ObjectiveConfig:
    """L = ce_weight * CE(softmax(z_target), z_draft) + feature_weight * SmoothL1(f_draft, f_target).

    `chunk_tokens` positions see the vocabulary at once; `feature_noise` is the half-width of uniform noise on the input.
    """

    ce_weight: float = MISSING
    feature_weight: float = MISSING
    smooth_l1_beta: float = 1.0
    feature_noise: float = 0.0
    chunk_tokens: int = 1024


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
    """Length and rhythm of a run, in optimizer steps. With both `epochs` and `max_steps` the shorter one ends it."""

    epochs: int | None = None
    max_steps: int | None = None
    global_batch_size: int = MISSING
    micro_batch_size: int = MISSING
    precision: Precision = MISSING
    save_every: int = 0
    keep_last: int = 2
    validate_every: int = 0
    log_every: int = 10
    log_interval_s: float = 15.0


@dataclass(kw_only=True)
class DecodeConfig:
    """How a draft is measured. `options` holds what differs from a policy's own defaults, by policy name."""

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


SUBSCHEMAS: dict[tuple[str, str], type] = {
    ("draft", "eagle"): EagleDraftConfig,
    ("tracking", "jsonl"): TrackingConfig,
    ("tracking", "tensorboard"): TrackingConfig,
    ("tracking", "wandb"): WandbConfig,
}


def register() -> None:
    """Puts the schemas where `defaults` lists find them: the roots, and one per kind under `schema/`."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=Config)
    store.store(name="validate_schema", node=ValidateConfig)
    for (group, kind), schema in SUBSCHEMAS.items():
        store.store(group=f"schema/{group}", name=kind, node=schema)


def config_dir() -> Path:
    """The folder of YAML files: `train/_conf` of an installed package, `conf/` of a checkout."""
    spec = importlib.util.find_spec("train._conf")
    if spec is not None and spec.submodule_search_locations:
        return Path(list(spec.submodule_search_locations)[0])
    return Path(__file__).resolve().parent.parent / "conf"

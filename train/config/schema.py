"""The typed configuration of a run: names, types, and defaults that are the same for every choice of a group.

Does not own: numbers that differ between choices (`conf/`), cross-field checks (train.config.checks).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from data_prep.config import DataConfig
from sage.trees.names import POLICIES
from sage.vision_attention import VisionAttention
from train.config.draft import DraftConfig


class ConfigError(ValueError):
    """A user's mistake in the configuration: one line with key, value, allowed values and remedy."""


Device = StrEnum("Device", ["auto", "cpu", "cuda"])
DeviceMap = StrEnum("DeviceMap", ["auto", "balanced", "sequential"])
Precision = StrEnum("Precision", ["fp32", "bf16"])
Schedule = StrEnum("Schedule", ["constant", "cosine"])
Offload = StrEnum("Offload", ["none", "cpu"])
TrackingKind = StrEnum("TrackingKind", ["jsonl", "tensorboard", "wandb"])
WandbMode = StrEnum("WandbMode", ["online", "offline"])
# Ranks that decode during training: rank 0, all ranks with a part of the prompts, or `auto`: all if each has a GPU.
ValidateOn = StrEnum("ValidateOn", ["auto", "main", "all"])
ScoreMetric = StrEnum("ScoreMetric", ["tokens_per_target_pass", "speedup"])  # the figure of a report that is the score
PolicyName = StrEnum("PolicyName", {name: name for name in POLICIES})  # type: ignore[misc]
# Decoding methods of Hugging Face, measured beside the policies.
Baseline = StrEnum("Baseline", ["hf_generate", "hf_static_cache", "hf_prompt_lookup", "hf_assisted"])


@dataclass(kw_only=True)
class RunConfig:
    """The run folder. `dir` holds all files of the run; `resume` continues an interrupted run from its newest state."""

    name: str = MISSING
    dir: str = MISSING
    resume: bool = False


@dataclass(kw_only=True)
class LaunchConfig:
    """Ranks on this machine.

    Attributes:
        gpus: number of ranks; `ranks` is an alias. Both stay unset inside torchrun, deepspeed or srun.
        timeout_s: time limit of a collective operation; has to exceed a validation by rank 0 alone.
        threads: CPU threads per rank.
        plan: prints memory and time of the run instead of training, for GPUs with `gpu_memory_gb` (10^9 bytes) and
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
class TargetRecipe:
    """Defaults of `optim.lr`, `train.global_batch_size` and `train.micro_batch_size` that suit the target's width."""

    lr: float | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | None = None


@dataclass(kw_only=True)
class TargetConfig:
    """The frozen vision-language model: a local folder or a hub id; `recipe` has the training defaults for it.

    Attributes:
        attention: of the vision tower.
    """

    name: str = MISSING
    path: str = MISSING
    revision: str | None = None
    dtype: Precision = MISSING
    attention: VisionAttention = VisionAttention.auto
    recipe: TargetRecipe = field(default_factory=TargetRecipe)

    def load_options(self) -> dict[str, Any]:
        """Returns keyword arguments of `sage.load_target` beyond path, dtype and device."""
        revision = {} if self.revision is None else {"revision": self.revision}
        return {"attention": str(self.attention), **revision}


@dataclass(kw_only=True)
class DeepspeedConfig:
    """DeepSpeed's configuration; batch sizes, precision and clipping are derived from other groups.

    Attributes:
        stage: ZeRO stage of the draft.
        shard_target: shards the frozen target over the ranks (see `train.engine.sharded_teacher`).
        extra: further keys of DeepSpeed's configuration, passed unchanged.
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
    input features. `name` is the choice of `objective=`, for the name of a run.
    """

    name: str = ""
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
    """AdamW. `grad_clip` 0 disables clipping; `min_lr_ratio` is the final learning rate of the cosine divided by `lr`."""

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
    """Length and schedule of a run, in optimizer steps.

    Attributes:
        epochs, max_steps: the run ends at the first one reached; without both, after one epoch, which is repeated for small
            data (see `train.config.run_length`).
        save_every: 0: only at the end.
        keep_last: number of newest states kept, beside the state of the best draft.
        keep_every: states of steps that are a multiple of this are kept as well; 0: none.
        length_window: optimizer steps within which examples are sorted by length, to reduce padding and waiting between
            ranks; the steps are shuffled afterwards. 1: no sorting.
        patience: number of validations in a row without a better score that ends the run; 0: never.
        profile: [first, last] step to trace.
        log_interval_s: of the progress line where stderr is not a terminal.
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
    """How a draft is measured.

    Attributes:
        policies: names of `sage.POLICIES`.
        options: policy name -> options that differ from the policy's defaults.
        dtype: of both models; null: as trained.
        assistant: the smaller model of the baseline `hf_assisted`; not needed if the draft is a smaller model.
        replay: also reports the results of every policy on the recorded drafts.
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
    """The score of a draft: selects `draft_best/`, stops early, and is maximized by a sweep.

    `policy` null: `sage` if measured, else the first policy that drafts.
    """

    policy: PolicyName | None = None
    metric: ScoreMetric = ScoreMetric.tokens_per_target_pass


@dataclass(kw_only=True)
class TrackingConfig:
    """The sink of metrics beside `metrics.jsonl`, which is always written."""

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
    """The configuration of `sage-train`."""

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
class ValidateConfig:
    """The configuration of `sage-validate`. For a run, keys not given on the command line come from its config.yaml.

    Attributes:
        checkpoint: a run (its best draft), RUN/draft, RUN/draft_best or the folder of a draft; also as `draft=`.
        out: `validation/step_########/` is written below it; default: a new folder in `checks/` of the run.
        device_map: spreads a target that is too large for one GPU over those of this machine: auto, balanced or sequential.
    """

    checkpoint: str | None = None
    out: str | None = None
    device_map: DeviceMap | None = None
    debug: bool = False
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(sources={}))
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

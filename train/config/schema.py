"""The typed configuration of a run: names, types, ranges, and defaults that are the same for every choice of a group."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from omegaconf import MISSING

from data_prep.config import DataConfig, RegenerateConfig
from sage.bench.options import MeasuredTokens, MeasurementSettings
from sage.decoding.settings import AnswerSettings
from sage.io.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range
from sage.runtime.modes import PassMode, Quantize, VisionAttention
from sage.trees import POLICIES
from train.config.draft import DraftConfig


class ConfigError(ValueError):
    """A user's mistake in the configuration: one line with key, value, allowed values and remedy."""


MAX_STAGE = 3  # of ZeRO
RECIPE_LENGTH = 4096  # tokens of the sequences for which recipes are made

Device = StrEnum("Device", ["auto", "cpu", "cuda"])
DeviceMap = StrEnum("DeviceMap", ["auto", "balanced", "sequential"])
Precision = StrEnum("Precision", ["fp32", "bf16"])
OptimizerKind = StrEnum("OptimizerKind", ["adamw", "muon"])
Schedule = StrEnum("Schedule", ["constant", "cosine"])
Compile = StrEnum("Compile", ["auto", "layers", "none"])
Offload = StrEnum("Offload", ["none", "cpu"])
TrackingKind = StrEnum("TrackingKind", ["jsonl", "tensorboard", "wandb"])
WandbMode = StrEnum("WandbMode", ["online", "offline"])
ValidateOn = StrEnum("ValidateOn", ["auto", "main", "all"])
ShardOver = StrEnum("ShardOver", ["auto", "node", "world"])
ScoreMetric = StrEnum("ScoreMetric", ["tokens_per_target_pass", "speedup"])
PolicyName = StrEnum("PolicyName", {name: name for name in POLICIES})  # type: ignore[misc]
Baseline = StrEnum("Baseline", ["hf_generate", "hf_static_cache", "hf_compiled", "hf_prompt_lookup", "hf_assisted"])


@dataclass(kw_only=True)
class RunConfig:
    """The run folder.

    Attributes:
        name: the last part of the default folder.
        dir: holds all files of the run.
        resume: continue the run in `dir` from its newest state, with its own configuration.
    """

    name: str = MISSING
    dir: str = MISSING
    resume: bool = False


@dataclass(kw_only=True)
class LaunchConfig:
    """Ranks on this machine.

    Attributes:
        gpus: number of ranks; null: 1, or the ranks of torchrun, deepspeed or srun.
        ranks: the same as `gpus`, for ranks on a CPU.
        device: device of the ranks.
        timeout_s: time limit of a collective operation in seconds; has to exceed a validation by rank 0 alone.
        threads: CPU threads per rank; null: as torch chooses.
        plan: print memory and time of the run instead of training.
        gpus_per_node: GPUs of one machine for the plan.
        gpu_memory_gb: memory of one GPU for the plan and for `deepspeed.shard_over=auto`, in 10^9 bytes.
        gpu_tflops: speed of one GPU in large matrix products for the plan, in 10^12 floating-point operations per second.
        gpu_peak_tflops: speed on its data sheet, of which the plan states the share.
        gpu_gb_per_s: sustained memory bandwidth of one GPU for the plan, in 10^9 bytes per second.
    """

    gpus: PositiveInt | None = None
    ranks: PositiveInt | None = None
    device: Device = Device.auto
    timeout_s: PositiveInt = 7200
    threads: PositiveInt | None = None
    plan: bool = False
    gpus_per_node: PositiveInt = 8
    gpu_memory_gb: Annotated[float, Range(gt=0, remedy="the figure of one GPU")] = 80.0
    gpu_tflops: Annotated[float, Range(gt=0, remedy="the figure of one GPU")] = 700.0
    gpu_peak_tflops: Annotated[float, Range(gt=0, remedy="the figure of one GPU")] = 989.0
    gpu_gb_per_s: Annotated[float, Range(gt=0, remedy="the figure of one GPU")] = 2700.0


@dataclass(kw_only=True)
class TargetRecipe:
    """Training defaults that suit the target's width.

    Attributes:
        lr: default of `optim.lr`.
        global_batch_size: default of `train.global_batch_size`, in sequences.
        micro_batch_size: default of `train.micro_batch_size`, in sequences of at most 4096 tokens (`sequences_per_pass`).
        max_length: default of `data.max_length`: tokens of the largest image that the target's image processor gives, and text.
        anchors: default of `objective.anchors` for drafts that are trained from anchors.
    """

    lr: PositiveFloat | None = None
    global_batch_size: PositiveInt | None = None
    micro_batch_size: PositiveInt | None = None
    max_length: PositiveInt = RECIPE_LENGTH
    anchors: PositiveInt = 512


@dataclass(kw_only=True)
class TargetConfig:
    """The frozen vision-language model.

    Attributes:
        name: label in reports and in the name of a run.
        path: a local folder or a hub id; alone, it selects any other model of a supported family.
        revision: branch, tag or commit of a hub id; null: the newest.
        adapter: folder or hub id of a PEFT adapter, merged into the target's weights at load; null for none.
        quantize: what the weights of linear layers are quantized to at load; null: as they are.
        dtype: dtype of the target.
        attention: attention of the vision tower.
        parameters_b: published number of parameters, in 10^9.
        architecture: fields of the config.json of a shipped target's hub id, so that a plan needs no network.
    """

    name: str = MISSING
    path: str = MISSING
    revision: str | None = None
    adapter: str | None = None
    quantize: Quantize | None = None
    dtype: Precision = MISSING
    attention: VisionAttention = VisionAttention.auto
    recipe: TargetRecipe = field(default_factory=TargetRecipe)
    parameters_b: PositiveFloat | None = None
    architecture: dict[str, Any] | None = None

    def load(self, device: Any, dtype: str | None = None, device_map: str | None = None) -> Any:
        """Loads the target to a device, in its own dtype unless another one is given."""
        import sage
        from sage.io.dtypes import torch_dtype

        options: dict[str, Any] = {"dtype": torch_dtype(dtype or self.dtype), "device": device, "device_map": device_map}
        options |= {"attention": str(self.attention), "adapter": self.adapter, "quantize": self.quantize}
        return sage.load_target(self.path, **options, **({} if self.revision is None else {"revision": self.revision}))


@dataclass(kw_only=True)
class DeepspeedConfig:
    """DeepSpeed's configuration; batch sizes, precision and clipping are derived from other groups.

    Attributes:
        stage: ZeRO stage of the draft, 0 to 3.
        overlap_comm: overlap the reduction of gradients with the backward pass.
        bucket_elements: gradient elements per communication bucket.
        offload_optimizer: where the optimizer state is kept; none: on the GPU.
        shard_target: shard the frozen target over the ranks.
        shard_over: ranks that hold its layers once: of one node, of all nodes (world), or auto: of a node, if a rank's part
            takes at most a quarter of `launch.gpu_memory_gb`.
        extra: further keys of DeepSpeed's configuration, passed unchanged; added as +deepspeed.extra.KEY=VALUE.
    """

    stage: Annotated[int, Range(ge=0, le=MAX_STAGE, remedy="choose deepspeed=zero0..zero3")] = MISSING
    overlap_comm: bool = False
    bucket_elements: PositiveInt = 500_000_000
    offload_optimizer: Offload = Offload.none
    shard_target: bool = False
    shard_over: ShardOver = ShardOver.auto
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ObjectiveConfig:
    """Weights of the loss terms (`train.distill.chunked_loss`) and the number of unrolled steps.

    Attributes:
        name: the choice of `objective=`, for the name of a run.
        ce_weight: weight of the soft cross-entropy to the target's distribution.
        feature_weight: weight of SmoothL1 between the features of draft and target; 0 for drafts that predict none.
        tv_weight: weight of the total variation distance, one minus the acceptance probability.
        lk_weight: weight of the LK loss, -log of the acceptance probability.
        steps: unrolled draft steps per training step.
        step_decay: factor of the loss from one unrolled step to the next.
        temperature: temperature of both distributions in the soft cross-entropy.
        smooth_l1_beta: feature difference at which SmoothL1 turns from quadratic to linear.
        feature_noise: half-width of the uniform noise on the input features.
        chunk_tokens: predicted tokens, of all unrolled steps, whose logits exist at a time; lower needs less memory.
        anchors: positions per sequence from which drafts are trained; null: all of them.
        dpace_alpha: weigh the levels of a block by D-PACE with this smoothing, instead of by `step_decay`; null: off.
    """

    name: str = ""
    ce_weight: NonNegativeFloat = MISSING
    feature_weight: NonNegativeFloat = MISSING
    tv_weight: NonNegativeFloat = 0.0
    lk_weight: NonNegativeFloat = 0.0
    steps: PositiveInt = 1
    step_decay: Annotated[float, Range(gt=0, remedy="0.8 is the usual value")] = 1.0
    temperature: Annotated[float, Range(gt=0, remedy="1.0 is the usual value")] = 1.0
    smooth_l1_beta: Annotated[float, Range(gt=0, remedy="1.0 is the usual value")] = 1.0
    feature_noise: NonNegativeFloat = 0.0
    chunk_tokens: PositiveInt = 1024
    anchors: PositiveInt | None = None
    dpace_alpha: Annotated[float, Range(ge=0, lt=1, remedy="0.1 is a usual value")] | None = None


@dataclass(kw_only=True)
class OptimConfig:
    """AdamW, or Muon.

    Attributes:
        kind: adamw; or muon: orthogonalized momentum for the matrices of linear layers, AdamW for the rest.
        lr: peak learning rate.
        beta1: AdamW's decay of the first moment.
        beta2: AdamW's decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        schedule: course of the learning rate after the warm-up.
        warmup_steps: optimizer steps of linear warm-up.
        min_lr_ratio: final learning rate of the cosine, as a share of `lr`.
        grad_clip: maximum norm of the gradient; 0: no clipping.
    """

    kind: OptimizerKind = OptimizerKind.adamw
    lr: Annotated[float, Range(gt=0, remedy="SpecVLM uses 8e-5 for a 7B target")] = MISSING
    beta1: Annotated[float, Range(ge=0, lt=1, remedy="see conf/optim")] = 0.9
    beta2: Annotated[float, Range(ge=0, lt=1, remedy="see conf/optim")] = 0.95
    eps: NonNegativeFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    schedule: Schedule = Schedule.constant
    warmup_steps: NonNegativeInt = 0
    min_lr_ratio: Annotated[float, Range(ge=0, lt=1, remedy="see conf/optim")] = 0.0
    grad_clip: NonNegativeFloat = MISSING


@dataclass(kw_only=True)
class TrainConfig:
    """Length and schedule of a run, in optimizer steps.

    Attributes:
        epochs: passes over the data. The first of three limits ends a run; without any, one epoch, repeated for small data.
        max_steps: optimizer steps.
        max_minutes: minutes of training, without validation and saving, over all starts of the run; the learning rate follows
            the share of them that has passed, and the draft is validated afterwards.
        global_batch_size: sequences per optimizer step over all ranks.
        micro_batch_size: sequences per rank and pass; not used with `micro_batch_tokens`.
        micro_batch_tokens: tokens per rank and pass, padding included; sequences of similar length form as many micro-batches
            as they need, the same number on every rank. A longer sequence is a micro-batch of its own. null: no budget.
        precision: dtype of the draft's forward and backward pass; the optimizer keeps float32 weights.
        save_every: optimizer steps between two saved states; 0: only at the end.
        keep_last: number of newest states kept, beside the state of the best draft.
        keep_every: states of steps that are a multiple of this are kept as well; 0: none.
        length_window: optimizer steps whose examples are sorted by length, against padding, and then shuffled; 1: no sorting.
        validate_every: optimizer steps between two validations by the decoder; 0: only at the end.
        validate_on: ranks that decode: rank 0 (main), all ranks with a part of the prompts, or auto: all if each has a GPU.
        patience: number of validations in a row without a better score that ends the run; 0: never.
        deterministic: restricts training steps to deterministic algorithms of PyTorch, which are slower on a GPU.
        compile: which modules `torch.compile` compiles: layers of target and draft, none, or auto: layers on a GPU, unless
            `deterministic`. Layers that ZeRO-3 shards are not compiled.
        profile: [first, last] step to trace; null: none.
        log_every: optimizer steps between two lines of metrics.jsonl.
        log_interval_s: seconds between two progress lines where stderr is not a terminal.
    """

    epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    max_minutes: PositiveFloat | None = None
    global_batch_size: PositiveInt = MISSING
    micro_batch_size: PositiveInt = MISSING
    micro_batch_tokens: PositiveInt | None = None
    precision: Precision = MISSING
    save_every: NonNegativeInt = 0
    keep_last: PositiveInt = 2
    keep_every: NonNegativeInt = 0
    length_window: PositiveInt = 16
    validate_every: NonNegativeInt = 0
    validate_on: ValidateOn = ValidateOn.auto
    patience: NonNegativeInt = 0
    deterministic: bool = False
    compile: Compile = Compile.auto
    profile: list[PositiveInt] | None = None
    log_every: PositiveInt = 10
    log_interval_s: NonNegativeFloat = 15.0


@dataclass(kw_only=True)
class DecodeConfig(MeasurementSettings):
    """How a draft is measured.

    Attributes:
        policies: policies that are measured.
        options: policy name -> options that differ from the policy's defaults, as decode.options.POLICY.KEY=VALUE;
            `sage-bench policies` lists them.
        baselines: decoders of Hugging Face that are measured beside the policies.
        num_prompts: number of held-out prompts.
        dtype: dtype of both models; null: as trained.
        passes: how passes run; auto: captured on a GPU, compiled on a CPU if many answers are decoded, else eager.
        assistant: the smaller model of the baseline `hf_assisted`; not needed if the draft is a smaller model.
        traces: prompts with the most, and as many with the fewest, tokens per target pass that report.html shows round by
            round; decoded once more after the measurement, with the two fastest policies and without a draft.
    """

    policies: list[PolicyName] = MISSING
    options: dict[str, Any] = field(default_factory=dict)
    baselines: list[Baseline] = field(default_factory=list)
    num_prompts: PositiveInt = MISSING
    max_new_tokens: MeasuredTokens = AnswerSettings.max_new_tokens
    repeats: PositiveInt = 1
    dtype: Precision | None = None
    passes: PassMode = PassMode.auto
    assistant: str | None = None
    traces: NonNegativeInt = 3


@dataclass(kw_only=True)
class ScoreConfig:
    """The score of a draft: selects `draft_best/`, stops early, and is maximized by a sweep.

    Attributes:
        policy: the policy that is scored; null: `sage` if measured, else the first policy that drafts.
        metric: the figure of its report that is the score.
    """

    policy: PolicyName | None = None
    metric: ScoreMetric = ScoreMetric.tokens_per_target_pass


@dataclass(kw_only=True)
class TrackingConfig:
    """The sink of metrics beside `metrics.jsonl`, which is always written.

    Attributes:
        kind: set by the choice.
    """

    kind: TrackingKind = TrackingKind.jsonl


@dataclass(kw_only=True)
class WandbConfig(TrackingConfig):
    """Weights & Biases.

    Attributes:
        project: project of the run.
        entity: user or team; null: the default of the login.
        group: group of the run; null: none.
        mode: offline keeps the run in the run folder until `wandb sync`.
    """

    kind: TrackingKind = TrackingKind.wandb
    project: str = "sage-draft"
    entity: str | None = None
    group: str | None = None
    mode: WandbMode = WandbMode.online


@dataclass(kw_only=True)
class Config:
    """The configuration of `sage-train`.

    Attributes:
        seed: seed of the draft's weights, of the order of examples, and of noise.
        debug: detailed log.
    """

    seed: NonNegativeInt = 0
    debug: bool = False
    run: RunConfig = field(default_factory=RunConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(sources={}))
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
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
        out: `validation/step_########/` is written below it; null: a new folder in `checks/` of the run.
        debug: detailed log.
        device_map: split a target that is too large for one GPU across those of this machine; null: one device.
    """

    checkpoint: str | None = None
    out: str | None = None
    device_map: DeviceMap | None = None
    debug: bool = False
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(sources={}))
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

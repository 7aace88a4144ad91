"""The part of a run's configuration that is about the draft: its kinds, and the compressors of its visual input.

Owns: names, types and defaults, as `train.config.schema` does for the rest. Does not own: what a kind is (sage.drafts).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING


class DraftKind(StrEnum):
    eagle = "eagle"
    eagle3 = "eagle3"
    model = "model"


class CompressorKind(StrEnum):
    """What stands for a picture in what a draft head reads (see `sage.drafts.compressor.compressor`)."""

    none = "none"
    prune = "prune"
    pool = "pool"
    conv = "conv"
    resampler = "resampler"
    text_only = "text_only"
    weighted = "weighted"
    concat = "concat"
    select = "select"


class TrainedPart(StrEnum):
    """How much of a smaller target is trained: its decoder layers, also embedding and lm_head, or the vision tower as well."""

    layers = "layers"
    text = "text"
    all = "all"


class ImageInputs(StrEnum):
    """What the draft sees at picture positions: the visual embedding or the placeholder token's."""

    embed = "embed"
    token = "token"


@dataclass(kw_only=True)
class CompressorConfig:
    """What every visual compressor has; numbers are in `conf/draft/compressor/`."""

    kind: CompressorKind = CompressorKind.none


@dataclass(kw_only=True)
class RatioConfig(CompressorConfig):
    """prune, pool, conv, weighted: `ratio` visual pairs become one row."""

    ratio: int = MISSING


@dataclass(kw_only=True)
class ResamplerConfig(CompressorConfig):
    """A picture becomes so many rows."""

    queries: int = MISSING


@dataclass(kw_only=True)
class ConcatConfig(RatioConfig, ResamplerConfig):
    """Several operators side by side: `ratio` is that of pool (and prune), `conv_ratio` that of conv."""

    conv_ratio: int = MISSING


@dataclass(kw_only=True)
class SelectConfig(ConcatConfig):
    """One of several operators per picture; a higher `temperature` blurs what the gate learns from its draws."""

    temperature: float = MISSING


@dataclass(kw_only=True)
class DraftConfig:
    """What every draft has. `path` continues from a saved draft instead of fresh weights."""

    kind: DraftKind = MISSING
    path: str | None = None
    compressor: CompressorConfig = field(default_factory=CompressorConfig)


@dataclass(kw_only=True)
class HeadDraftConfig(DraftConfig):
    """Sizes left unset follow the target (see `sage.new_draft`)."""

    image_inputs: ImageInputs = ImageInputs.embed
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None


@dataclass(kw_only=True)
class EagleDraftConfig(HeadDraftConfig):
    kind: DraftKind = DraftKind.eagle
    input_norm: bool = True


@dataclass(kw_only=True)
class Eagle3DraftConfig(HeadDraftConfig):
    """`feature_levels` are indices of the target's hidden_states, unset = low, middle, high (see `sage.drafts.eagle3`).

    `draft_vocab_size` keeps that many of the words the training answers are made of; unset = all.
    """

    kind: DraftKind = DraftKind.eagle3
    feature_levels: list[int] | None = None
    draft_vocab_size: int | None = None


@dataclass(kw_only=True)
class ModelDraftConfig(DraftConfig):
    """A smaller target of the same family: `path` goes on from a folder, `num_layers` starts from that many of the target's."""

    kind: DraftKind = DraftKind.model
    num_layers: int | None = None
    train_part: TrainedPart = TrainedPart.text

"""The `draft` group of a configuration: schemas of the kinds of draft (`sage.drafts.registry`) and of their compressors."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated

from omegaconf import MISSING

from sage.drafts.registry import KINDS, DraftKind
from sage.io.ranges import PositiveInt, Range

# The visual compressor of a draft head's input (see `sage.drafts.compressor`).
CompressorKind = StrEnum(
    "CompressorKind", ["none", "prune", "pool", "conv", "resampler", "text_only", "weighted", "concat", "select"]
)


@dataclass(kw_only=True)
class CompressorConfig:
    """Keys of every visual compressor; their values are in `conf/draft/compressor/`.

    Attributes:
        kind: set by the choice.
    """

    kind: CompressorKind = CompressorKind.none


@dataclass(kw_only=True)
class RatioConfig(CompressorConfig):
    """Keys of prune, pool, conv and weighted.

    Attributes:
        ratio: visual pairs that become one row (for concat and select: by prune and pool).
    """

    ratio: PositiveInt = MISSING


@dataclass(kw_only=True)
class ResamplerConfig(CompressorConfig):
    """Keys of the resampler.

    Attributes:
        queries: rows that an image becomes.
    """

    queries: PositiveInt = MISSING


@dataclass(kw_only=True)
class ConcatConfig(RatioConfig, ResamplerConfig):
    """Keys of several operators, concatenated.

    Attributes:
        conv_ratio: visual pairs that become one row by conv.
    """

    conv_ratio: PositiveInt = MISSING


@dataclass(kw_only=True)
class SelectConfig(ConcatConfig):
    """Keys of the selection of one operator per image.

    Attributes:
        temperature: temperature of the Gumbel-softmax gate in training.
    """

    temperature: Annotated[float, Range(gt=0, remedy="1.0 is the usual value")] = MISSING


@dataclass(kw_only=True)
class DraftConfig:
    """Keys of every draft.

    Attributes:
        kind: set by the choice.
        path: continue from a saved draft: RUN (its best draft), RUN/draft or the folder of a draft; null: fresh weights.
    """

    kind: str = MISSING
    path: str | None = None
    compressor: CompressorConfig = field(default_factory=CompressorConfig)


@cache
def draft_schema(kind: DraftKind) -> type[DraftConfig]:
    """Returns the schema of `draft=NAME`: the keys of every draft and the options of its kind."""
    return make_dataclass(
        _schema_name(kind),
        [("kind", str, kind.name)],
        bases=(kind.options, DraftConfig),
        namespace={"__module__": __name__, "__doc__": kind.options.__doc__},
        kw_only=True,
    )


def _schema_name(kind: DraftKind) -> str:
    return f"{kind.name.capitalize()}DraftConfig"


def __getattr__(name: str) -> type[DraftConfig]:
    """Returns a generated schema by its name; pickle needs it to pass a config to other ranks."""
    for kind in KINDS.values():
        if _schema_name(kind) == name:
            return draft_schema(kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The `draft` group of a run's configuration: schemas of the kinds of draft and of their visual compressors.

Does not own: the kinds and their options (sage.drafts.registry).
"""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from enum import StrEnum
from functools import cache

from omegaconf import MISSING

from sage.drafts.registry import KINDS, DraftKind


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
    """Keys of every draft. `path` continues from a saved draft instead of fresh weights."""

    kind: str = MISSING
    path: str | None = None
    compressor: CompressorConfig = field(default_factory=CompressorConfig)


@cache
def draft_schema(kind: DraftKind) -> type[DraftConfig]:
    """The schema of `draft=NAME`: the keys of every draft and the options of its kind."""
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

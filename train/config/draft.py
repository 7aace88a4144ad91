"""The `draft` group of a configuration: schemas of the kinds of draft (`sage.drafts.registry`) and of their compressors."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from omegaconf import MISSING

from sage.drafts.registry import COMPRESSORS, KINDS, DraftKind

CompressorKind = StrEnum("CompressorKind", {name: name for name in ("none", *COMPRESSORS)})  # type: ignore[misc]
NO_COMPRESSOR = CompressorKind("none")


@dataclass(kw_only=True)
class CompressorConfig:
    """Keys of every visual compressor; their values are in `conf/draft/compressor/`.

    Attributes:
        kind: set by the choice.
        ratio: visual pairs that become one row (for concat and select: by prune and pool).
        conv_ratio: visual pairs that become one row by conv.
        queries: rows that an image becomes.
        temperature: temperature of the Gumbel-softmax gate in training.
    """

    kind: CompressorKind = NO_COMPRESSOR


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
def compressor_schema(kind: str) -> type[CompressorConfig]:
    """Returns the schema of `draft/compressor=NAME`."""
    keys = [(name, hint, MISSING) for name, hint in COMPRESSORS.get(kind, {}).items()]
    return _schema(f"{kind.capitalize()}CompressorConfig", keys, (CompressorConfig,), None) if keys else CompressorConfig


@cache
def draft_schema(kind: DraftKind) -> type[DraftConfig]:
    """Returns the schema of `draft=NAME`: the keys of every draft and the options of its kind."""
    bases = (kind.options, DraftConfig)
    return _schema(f"{kind.name.capitalize()}DraftConfig", [("kind", str, kind.name)], bases, kind.options.__doc__)


def _schema(name: str, keys: list[Any], bases: tuple[type, ...], doc: str | None) -> Any:
    return make_dataclass(name, keys, bases=bases, namespace={"__module__": __name__, "__doc__": doc}, kw_only=True)


def __getattr__(name: str) -> type:
    """Returns a generated schema by its name; pickle needs it to pass a config to other ranks."""
    for schema in (*map(draft_schema, KINDS.values()), *map(compressor_schema, CompressorKind)):
        if schema.__name__ == name:
            return schema
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

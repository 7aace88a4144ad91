"""Readers of on-disk formats, each of which yields `Conversation`s; one module per format, registered in `KINDS`.

Adding a source is one module with `open_source` (see `base.Source`; `open_stream` where it supports `streaming`) and one entry
in `KINDS`; a prompt set is one entry in `prompt_layouts.LAYOUTS`. Does not own: preparation,
caching and order (data_prep.dataset).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING

from data_prep.sources.prompt_layouts import LAYOUTS
from sage.io.ranges import NonNegativeInt, PositiveFloat

if TYPE_CHECKING:
    from data_prep.sources.base import Source, Stream
    from data_prep.splits import Split


ALWAYS_USED = ("kind", "weight", "num_examples")  # fields of `SourceConfig`


class Content(StrEnum):
    """The content that `path` must have (data_prep.sources.paths)."""

    none = "none"  # there is no path
    json = "json"  # a JSON array or JSON Lines
    folder = "folder"
    table = "table"  # a hub name, a Parquet file, a folder of them
    any = "any"  # a hub name, or anything that exists


@dataclass(frozen=True)
class Kind:
    """A source format.

    Attributes:
        module: the module that reads it, imported on first use (`datasets` takes seconds to import).
        options: fields of `SourceConfig` that the format uses, besides `ALWAYS_USED`.
        content: what `path` must be.
    """

    module: str
    options: tuple[str, ...] = ("path", "media_root")
    content: Content = Content.none


@dataclass(kw_only=True)
class SourceConfig:
    """One source of conversations.

    Attributes:
        kind: a name in `KINDS`.
        path: file, folder, or hub name.
        media_root: base folder of relative image and video paths (default: the folder of the file).
        subset: hub configuration name.
        split: split of a hub data set; empty: the training split (prompt sets: the test split).
        columns: role -> column of a table; see data_prep.sources.hub.
        families: task families to keep; empty: all.
        weight: share of the examples of an epoch; null: proportional to the size of the source. All sources or none.
        num_examples: number of valid items to keep, from the first on; 0: all.
        streaming: read on the fly, in order, shuffled within blocks.
        prompt: question for sources that have none (folders of images and videos).
        long_answers: request a detailed explanation in place of a one-word answer.
    """

    kind: str = "pocket"
    path: str = ""
    media_root: str = ""
    subset: str = ""
    split: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    families: list[str] = field(default_factory=list)
    weight: PositiveFloat | None = None
    num_examples: NonNegativeInt = 0
    streaming: bool = False
    prompt: str = ""
    long_answers: bool = False


_PROMPT_SET = Kind("data_prep.sources.prompt_sets", ("path", "media_root", "subset", "split", "long_answers"), Content.any)
_TABLE = Kind("data_prep.sources.hub", ("path", "media_root", "subset", "split", "columns", "streaming"), Content.table)
KINDS = {
    "pocket": Kind("data_prep.sources.pocket", ("families",)),
    "llava_json": Kind("data_prep.sources.llava_json", content=Content.json),
    "sharegpt": Kind("data_prep.sources.llava_json", ("path",), Content.json),
    "messages": Kind("data_prep.sources.messages", content=Content.json),
    "llava_onevision": _TABLE,
    "hub": _TABLE,
    "folder": Kind("data_prep.sources.folder", ("path", "prompt"), Content.folder),
    **dict.fromkeys(LAYOUTS, _PROMPT_SET),
}


def check_source(key: str, source: SourceConfig) -> None:
    """Checks that the kind of a source is known and uses the fields that are set; ValueError names the key below `key`."""
    if source.kind not in KINDS:
        raise ValueError(f"{key}.kind: {source.kind!r}; allowed: {', '.join(sorted(KINDS))}")
    options, defaults = KINDS[source.kind].options, SourceConfig()
    for name in (part.name for part in fields(source) if part.name not in ALWAYS_USED):
        value = getattr(source, name)
        if value != getattr(defaults, name) and name not in options:
            allowed = ", ".join(options)
            raise ValueError(f"{key}.{name}: {value}; has no effect on kind {source.kind}; its options: {allowed}")


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str = "") -> Source:
    """Opens the source with the key `label`; raises ValueError if its path is empty, missing, or not of this kind."""
    from data_prep.sources.paths import check_path

    if config.path:
        check_path(config.kind, config.path)
    source: Source = import_module(KINDS[config.kind].module).open_source(label, config, split, cache_dir)
    source.limit = config.num_examples
    return source


def open_stream(label: str, config: SourceConfig, split: Split) -> Stream:
    """Opens the source of a config for reading in order; its kind must have the option `streaming`."""
    stream: Stream = import_module(KINDS[config.kind].module).open_stream(label, config, split)
    return stream

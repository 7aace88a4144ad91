"""The kinds of sources, and the configuration of one.

Adding a source is one module with `open_source` (see `base.Source`; `base.Stream` where it supports `streaming`) and one entry
in `KINDS`; a prompt set is one entry in `prompt_sets.LAYOUTS`, and its name here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum

from sage.io.ranges import NonNegativeInt, PositiveFloat, PositiveInt

ALWAYS_USED = ("kind", "weight", "num_examples")  # fields of `SourceConfig`


class Content(StrEnum):
    """The content that `path` must have."""

    none = "none"  # there is no path
    folder = "folder"
    rows = "rows"  # JSON or table files, a folder or a pattern of them, or OWNER/NAME on the hub
    table = "table"  # the same, or any name on the hub
    any = "any"  # a hub name, or anything that exists


@dataclass(frozen=True)
class Kind:
    """A source format."""

    module: str  # that reads it, imported on first use (`datasets` takes seconds to import)
    options: tuple[str, ...] = ("path", "media_root")  # fields of `SourceConfig` that it uses, besides `ALWAYS_USED`
    content: Content = Content.none


@dataclass(kw_only=True)
class SourceConfig:
    """One source of conversations.

    Attributes:
        kind: a name in `KINDS`.
        path: file, folder, pattern such as `shards/*.jsonl`, or hub name.
        media_root: base folder of relative image and video paths (default: the folder of the file).
        subset: hub configuration name.
        split: split of a data set; empty: the training split, and its own held-out ones (prompt sets: the test split).
        columns: role -> column; see data_prep.sources.layouts.
        families: task families to keep; empty: all.
        weight: share of the examples of an epoch; null: proportional to the size of the source. All sources or none.
        num_examples: number of valid items to keep, from the first on; 0: all.
        streaming: read on the fly, in order, shuffled within blocks.
        prompt: question for sources that have none (folders of images and videos).
        long_answers: request a detailed explanation in place of a one-word answer.
        joined: consecutive conversations that are joined into one of several turns, for long sequences.
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
    joined: PositiveInt = 1


_PROMPT_SET = Kind("data_prep.sources.prompt_sets", ("path", "media_root", "subset", "split", "long_answers"), Content.any)
_ROW_OPTIONS = ("path", "media_root", "subset", "split", "columns", "streaming")
_ROWS = Kind("data_prep.sources.hub", (*_ROW_OPTIONS, "prompt"), Content.rows)
_TABLE = Kind("data_prep.sources.hub", _ROW_OPTIONS, Content.table)
KINDS = {
    "auto": _ROWS,
    "pocket": Kind("data_prep.pocket.world", ("families", "joined")),
    **dict.fromkeys(("llava_json", "sharegpt", "messages"), _ROWS),  # the layout of a row is recognized by its keys
    **dict.fromkeys(("llava_onevision", "hub"), _TABLE),
    "folder": Kind("data_prep.sources.folder", ("path", "prompt"), Content.folder),
    **dict.fromkeys(("textvqa", "gqa", "chartqa", "seed_bench"), _PROMPT_SET),
    **dict.fromkeys(("mvbench", "video_detail_caption", "mmspec"), _PROMPT_SET),
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

"""Readers of on-disk formats, each of which yields `Conversation`s; one module per format, registered in `KINDS`.

Adding a source is one module with `open_source` (see `base.Source`; `open_stream` where it supports `streaming`) and one entry
in `KINDS`; a prompt set is one entry in `prompt_layouts.LAYOUTS`. Does not own: preparation,
caching and order (data_prep.dataset).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from data_prep.sources.prompt_layouts import LAYOUTS

if TYPE_CHECKING:
    from data_prep.config import SourceConfig
    from data_prep.sources.base import Source, Stream
    from data_prep.splits import Split


@dataclass(frozen=True)
class Kind:
    """A source format.

    Attributes:
        module: the module that reads it, imported on first use (`datasets` takes seconds to import).
        options: fields of `SourceConfig` that the format uses, besides `weight` and `num_examples`.
    """

    module: str
    options: tuple[str, ...] = ("path", "media_root")


_PROMPT_SET = Kind("data_prep.sources.prompt_sets", ("path", "media_root", "subset", "split", "long_answers"))
_TABLE = Kind("data_prep.sources.hub", ("path", "media_root", "subset", "split", "columns", "streaming"))
KINDS = {
    "pocket": Kind("data_prep.sources.pocket", ("families",)),
    "llava_json": Kind("data_prep.sources.llava_json"),
    "sharegpt": Kind("data_prep.sources.llava_json", ("path",)),
    "messages": Kind("data_prep.sources.messages"),
    "llava_onevision": _TABLE,
    "hub": _TABLE,
    "folder": Kind("data_prep.sources.folder", ("path", "prompt")),
    **dict.fromkeys(LAYOUTS, _PROMPT_SET),
}


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str = "") -> Source:
    """Opens the source with the key `label`; raises ValueError if its path does not exist or a required field is empty."""
    source: Source = import_module(KINDS[config.kind].module).open_source(label, config, split, cache_dir)
    source.limit = config.num_examples
    return source


def open_stream(label: str, config: SourceConfig, split: Split) -> Stream:
    """Opens the source of a config for reading in order; its kind must have the option `streaming`."""
    stream: Stream = import_module(KINDS[config.kind].module).open_stream(label, config, split)
    return stream

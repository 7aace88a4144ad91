"""One module per on-disk format, all yielding the same Conversation."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data_prep.config import SourceConfig, Split
    from data_prep.sources.base import Source, Stream


@dataclass(frozen=True)
class Kind:
    """A format: the module that reads it (imported when used, `datasets` takes seconds) and the settings it heeds."""

    module: str
    heeds: tuple[str, ...] = ("path", "media_root")


_PROMPTS = Kind("data_prep.sources.prompt_sets", ("path", "media_root", "subset", "split", "long_answers"))
_TABLE = Kind("data_prep.sources.hub", ("path", "media_root", "subset", "split", "columns", "streaming"))
KINDS = {
    "pocket": Kind("data_prep.sources.pocket", ("families",)),
    "llava_json": Kind("data_prep.sources.llava_json"),
    "sharegpt": Kind("data_prep.sources.llava_json", ("path",)),
    "messages": Kind("data_prep.sources.messages"),
    "llava_onevision": _TABLE,
    "hub": _TABLE,
    "folder": Kind("data_prep.sources.folder", ("path", "prompt")),
    "textvqa": _PROMPTS,
    "gqa": _PROMPTS,
    "chartqa": _PROMPTS,
    "seed_bench": _PROMPTS,
    "mvbench": _PROMPTS,
    "video_detail_caption": _PROMPTS,
    "mmspec": _PROMPTS,
}


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str = "") -> Source:
    """The source a config describes.

    Raises:
        ValueError: its file or folder does not exist, or a needed key is empty.
    """
    source: Source = import_module(KINDS[config.kind].module).open_source(label, config, split, cache_dir)
    source.limit = config.num_examples
    return source


def open_stream(label: str, config: SourceConfig, split: Split) -> Stream:
    """The same in order, for a kind that heeds `streaming`."""
    stream: Stream = import_module(KINDS[config.kind].module).open_stream(label, config, split)
    return stream

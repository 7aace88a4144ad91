"""Readers of on-disk formats, each of which yields `Conversation`s; one module per format, registered in `KINDS`.

The paths of sources are checked before anything is loaded: a missing path, a folder in place of a file, another format. At most
the first bytes of a file are read, and no torch is imported.

Adding a source is one module with `open_source` (see `base.Source`; `open_stream` where it supports `streaming`) and one entry
in `KINDS`; a prompt set is one entry in `prompt_layouts.LAYOUTS`.
"""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from data_prep.sources.prompt_layouts import LAYOUTS
from sage.io.ranges import NonNegativeInt, PositiveFloat, PositiveInt

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
BOM = b"\xef\xbb\xbf"
HEAD_BYTES = 4096
PACKED = {
    b"PAR1": "Parquet; choose data=hub",
    b"\x1f\x8b": "compressed with gzip; unpack it",
    b"PK": "a zip archive; unpack it",
}
ALWAYS_USED = ("kind", "weight", "num_examples")  # fields of `SourceConfig`


class Content(StrEnum):
    """The content that `path` must have."""

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
_TABLE = Kind("data_prep.sources.hub", ("path", "media_root", "subset", "split", "columns", "streaming"), Content.table)
KINDS = {
    "pocket": Kind("data_prep.sources.pocket", ("families", "joined")),
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


# -- paths -------------------------------------------------------------------------------------------------------------------


def check_path(kind: str, path: str) -> None:
    """Checks that a local path exists and has the content that the kind reads; a name on the hub passes."""
    content = KINDS[kind].content
    if content is Content.none:
        return
    if not os.path.exists(path):
        if content in (Content.table, Content.any) and not _is_local(path):
            return
        raise ValueError(f"{path}: no such file or folder{_similar(path)}")
    if content is Content.folder and not os.path.isdir(path):
        choice = f"choose {_json_choice(Path(path))}" if _is_json(path) else "give the folder"
        raise ValueError(f"{path}: a file, not a folder; data=folder reads images, each with a text file of its name; {choice}")
    if content is Content.json:
        _check_json(Path(path))
    if content is Content.table and _is_json(path) and os.path.isfile(path):
        raise ValueError(f"{path}: a JSON file, not a table; choose {_json_choice(Path(path))}")


def is_array(path: Path) -> bool:
    """Returns whether a JSON file is an array, as opposed to one object per line; its content decides, not its suffix."""
    return _head(path).startswith(b"[")


def layout_of(row: dict[str, Any]) -> str:
    """Returns the `data=` choice that reads a JSON row, empty if none does."""
    if isinstance(row.get("messages"), list):
        return "data=messages"
    if isinstance(row.get("conversations"), list):
        return "data=llava_instruct" if "image" in row or "video" in row else "data=sharegpt"
    return ""


def _check_json(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{path}: a folder, not a file of conversations; {content_hint(path) or 'give a JSON file'}")
    head = _head(path)
    if not head:
        raise ValueError(f"{path}: empty; give one JSON object per line, or an array of them")
    for magic, found in PACKED.items():
        if head.startswith(magic):
            raise ValueError(f"{path}: not JSON but {found}")
    if head[:1] not in (b"[", b"{"):
        shown = head.splitlines()[0][:30].decode("utf-8", "replace")
        raise ValueError(f"{path}: not JSON, it begins with {shown!r}; give one JSON object per line, or an array of them")
    if head.splitlines()[0].strip() == b"{":
        raise ValueError(f"{path}: one JSON object over several lines; give one object per line, or an array of them")


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD_BYTES).removeprefix(BOM).lstrip()


def _is_local(path: str) -> bool:
    return path.startswith((".", "/")) or path.count("/") > 1 or path.endswith((".parquet", *JSON_SUFFIXES))


def _is_json(path: str) -> bool:
    return path.lower().endswith(JSON_SUFFIXES)


def _similar(path: str) -> str:
    """Returns where a missing path was searched, and the name there that is most like it."""
    missing = Path(path).absolute()
    if not missing.parent.is_dir():
        return f"; there is no folder {missing.parent}; set data.path to the data"
    names = difflib.get_close_matches(missing.name, sorted(item.name for item in missing.parent.iterdir()), 1, 0.75)
    suggestion = f"did you mean {Path(path).parent / names[0]}?" if names else "set data.path to the data"
    return f" in {missing.parent}; {suggestion}"


def _json_choice(path: Path) -> str:
    """Returns the `data=` choice for a JSON file, by its first row."""
    try:
        text = _head(path).decode("utf-8", "ignore").lstrip("[ \r\n\t")
        row, _ = json.JSONDecoder().raw_decode(text)
    except (OSError, ValueError):
        row = None
    return (layout_of(row) if isinstance(row, dict) else "") or "data=messages or data=llava_instruct"


def content_hint(folder: Path) -> str:
    """Returns what to give in place of a folder: a JSON file in it, or the choice that reads its files; empty if unknown."""
    files = sorted(item for item in folder.iterdir() if item.is_file() and item.stat().st_size)
    rows = [item for item in files if item.suffix.lower() in JSON_SUFFIXES]
    if rows:
        return f"give {_json_choice(rows[0])} data.path={rows[0]}"
    if any(item.suffix.lower() == ".parquet" for item in files):
        return "for Parquet files choose data=hub"
    return "for images with a text file each choose data=folder" if files else ""

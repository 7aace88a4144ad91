"""Tables with embedded images: hub data sets by name, local parquet files, folders written by `save_to_disk`.

Columns are mapped by role: `columns: {question: q, answer: a, image: img}`. `ROLES` are the roles; `messages` is a column of
role/content or from/value turns. A column named like its role needs no mapping. LLaVA-OneVision-Data is the layout
{id, image, conversations, data_source}.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from data_prep.conversation import MEDIA, BadItem, Conversation, Message, Part, Row
from data_prep.sources import SourceConfig
from data_prep.sources.base import Source, Stream
from data_prep.sources.llava_json import llava_messages, media_list, place_media, text_part
from data_prep.sources.messages import chat_messages
from data_prep.sources.rows import RowSource, require_path
from data_prep.splits import Split
from sage.io.hub import HubUnreachable, require_hub

ROLES = ("id", "family", "system", "question", "answer", "image", "images", "video", "messages")
TURN_COLUMNS = ("messages", "conversations", "conversation")  # names of an unmapped column of turns


class TableRows:
    """Rows of a table by index, images undecoded; raises ValueError: no such data set, configuration or split."""

    def __init__(self, path: str, subset: str, split: str, cache_dir: str) -> None:
        self.name = path
        self.table = load_table(path, subset, split, cache_dir, streaming=False)

    @property
    def digest(self) -> str:
        return str(self.table._fingerprint)

    def __len__(self) -> int:
        return len(self.table)

    def row(self, index: int) -> Any:
        """Returns the row at `index`."""
        return self.table[index]


class HubStream(Stream):
    """Rows of a hub data set in order, without a download."""

    def __init__(self, source: RowSource, path: str, subset: str, split: str, limit: int) -> None:
        self.name, self.source, self.subset, self.split, self.limit = path, source, subset, split, limit

    def iterate(self, start: int) -> Iterator[Conversation | BadItem]:
        """Yields the items from `start` on; an invalid row as its error."""
        table = load_table(self.name, self.subset, self.split, "", streaming=True).skip(start)
        if self.limit:
            table = table.take(max(0, self.limit - start))
        for index, row in enumerate(table, start):
            try:
                yield self.source.convert(row, index)
            except BadItem as error:
                yield error

    def fingerprint(self) -> str:
        return f"{self.name}:{self.subset}:{self.split}:{self.limit}:{self.source.settings}"


def load_table(path: str, subset: str, split: str, cache_dir: str, streaming: bool) -> Any:
    """Opens a `datasets` table (or stream) with images and videos undecoded, as {"bytes", "path"}; ValueError with name and
    cause if it cannot be found or read, or if `datasets` is not installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"data set {path}: package datasets is not installed; pip install 'sage-draft[data]'")
    import datasets

    cache = str(Path(cache_dir).expanduser() / "tables") if cache_dir else None
    try:
        if os.path.exists(os.path.join(path, "dataset_dict.json")):
            table = datasets.load_from_disk(os.path.join(path, split))
        elif os.path.exists(os.path.join(path, "dataset_info.json")):
            table = datasets.load_from_disk(path)
        else:
            name, config, files = _load_arguments(path, subset)
            is_cached = cache is not None and (Path(cache) / name.replace("/", "___").lower()).exists()
            if name != "parquet" and not is_cached:
                require_hub(name, "data.path")
            table = datasets.load_dataset(name, config, data_files=files, split=split, streaming=streaming, cache_dir=cache)
    except HubUnreachable:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        given = f"subset {subset!r}, split {split!r}"
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"data set {path}: {reason}; check path, subset and split (here {given})") from error
    return _undecoded(table)


def _load_arguments(path: str, subset: str) -> tuple[str, str | None, Any]:
    """Returns (name, configuration, data files) for `load_dataset`: a hub name, one parquet file, or a folder like a hub's.

    The README.md of a folder declares its configurations and splits; without one, a configuration is a subfolder, and a file
    belongs to the split that its name begins with (`train-00000-of-00002.parquet`).
    """
    if path.endswith(".parquet"):
        return "parquet", None, {"train": path, "validation": path, "test": path}
    is_folder = subset and os.path.isdir(path) and not os.path.exists(os.path.join(path, "README.md"))
    return (os.path.join(path, subset), None, None) if is_folder else (path, subset or None, None)


def _undecoded(table: Any) -> Any:
    import datasets

    for name, feature in (table.features or {}).items():
        inner = getattr(feature, "feature", None)
        if isinstance(feature, (datasets.Image, datasets.Video)):
            table = table.cast_column(name, type(feature)(decode=False))
        elif isinstance(inner, datasets.Image):
            table = table.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return table


def table_messages(row: Row, columns: dict[str, str], media_root: str) -> list[Message]:
    """Returns a row's columns as messages."""
    turns = columns.get("messages") or next((name for name in TURN_COLUMNS if name in row), None)
    found = {kind: _media_column(row, columns, kind) for kind in MEDIA}
    if turns is not None and "question" not in columns:
        return _turn_messages(row[turns], found, media_root)
    media = {kind: media_list(values, media_root, kind) for kind, values in found.items()}
    question = str(_column(row, columns, "question"))
    parts = place_media(question, media) if any(f"<{kind}>" in question for kind in MEDIA) else text_part(question)
    media_parts: list[Part] = [{"type": kind, kind: value} for kind in MEDIA for value in media[kind]]
    messages: list[Message] = [{"role": "user", "content": media_parts + parts}]
    system, answer = (_column(row, columns, role, is_optional=True) for role in ("system", "answer"))
    if system:
        messages.insert(0, {"role": "system", "content": str(system)})
    if isinstance(answer, list):
        answer = answer[0] if answer else None
    if answer is not None:
        messages.append({"role": "assistant", "content": str(answer)})
    return messages


def _turn_messages(turns: Any, media: dict[str, list[Any]], media_root: str) -> list[Message]:
    """Returns turns as messages. Media without placeholders go to the first question, as in LLaVA."""
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("no list of turns")
    speaker, text_key = ("from", "value") if "from" in turns[0] else ("role", "content")
    text = "".join(turn[text_key] for turn in turns if isinstance(turn.get(text_key), str))
    placeholders = "".join(f"<{kind}>" * len(media[kind]) for kind in MEDIA if f"<{kind}>" not in text)
    first = next((i for i, turn in enumerate(turns) if turn.get(speaker) in ("human", "user")), 0)
    if placeholders and isinstance(turns[first].get(text_key), str):
        question = {**turns[first], text_key: placeholders + turns[first][text_key]}
        turns = [*turns[:first], question, *turns[first + 1 :]]
    if speaker == "from":
        return llava_messages({"conversations": turns, **media}, media_root)
    return chat_messages({"messages": turns, **{f"{kind}s": media[kind] for kind in MEDIA}}, media_root)


def _media_column(row: Row, columns: dict[str, str], kind: str) -> list[Any]:
    names = [columns[role] for role in (kind, f"{kind}s") if role in columns]
    names = names or [role for role in (kind, f"{kind}s") if row.get(role) is not None]
    values = [value for name in names for value in (row[name] if isinstance(row[name], list) else [row[name]])]
    contents = (value.get("bytes") or value.get("path") if isinstance(value, dict) else value for value in values)
    return [content for content in contents if content is not None]


def _column(row: Row, columns: dict[str, str], role: str, is_optional: bool = False) -> Any:
    if role not in columns and is_optional:
        return row.get(role)
    name = columns.get(role, role)
    if name not in row:
        raise ValueError(f"no column {name!r}, it has {', '.join(row)}; set data.sources.NAME.columns.{role}")
    return row[name]


def _row_source(label: str, config: SourceConfig, rows: Any, media_root: str) -> RowSource:
    unknown = sorted(set(config.columns) - set(ROLES))
    if unknown:
        raise ValueError(f"data.sources.{label}.columns: role {unknown[0]!r}; allowed: {', '.join(ROLES)}")
    to_messages = partial(table_messages, columns=config.columns, media_root=media_root)
    settings = (config.columns, media_root)
    id_key, family_key = config.columns.get("id", "id"), config.columns.get("family", "data_source")
    return RowSource(rows, to_messages, settings, id_key, "", family_key)


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str) -> Source:
    """Opens a hub data set, a parquet file, a folder of parquet files, or one written by `save_to_disk`."""
    path = require_path(label, config.path, "a hub name, a parquet file or a folder of them")
    rows = TableRows(path, config.subset, config.split or "train", cache_dir)
    return _row_source(label, config, rows, config.media_root or (path if os.path.isdir(path) else os.path.dirname(path)))


def open_stream(label: str, config: SourceConfig, split: Split) -> Stream:
    """Opens the same for reading in order, without a download."""
    path = require_path(label, config.path, "a hub name, a parquet file or a folder of them")
    source = _row_source(label, config, SimpleNamespace(name=path), config.media_root)  # rows are given to `convert`
    return HubStream(source, path, config.subset, config.split or "train", config.num_examples)

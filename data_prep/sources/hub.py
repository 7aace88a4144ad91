"""Conversations in rows (JSON files, tables with embedded images, data sets of the hub, folders written by `save_to_disk`), and
folders of images, frame folders and video files, each with its answer in a text file of the same name:

    cat.jpg      cat.txt         an image and its description
    street/      street.txt      a folder of frames, in the order of their names
    park.mp4     park.txt        a video file, if a reader is installed

The question is `prompt`. A folder without texts provides prompts, also for regeneration, but no training examples.

The files of a path are found by `data_prep.sources.files`, the layout of their rows by `data_prep.sources.layouts`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from data_prep.conversation import BadItem, Conversation, Message, Row
from data_prep.sources.base import Source, Split, as_example
from data_prep.sources.files import DataFiles, Form, SourceConfig, find_files, row_files, unread_files
from data_prep.sources.layouts import ROLES, Roots, described, table_messages
from data_prep.sources.rows import JsonRows, RawRows, RowSource, joined_rows
from sage.inputs.media import frame_files
from sage.inputs.video import VIDEO_SUFFIXES
from sage.io.hub import HubUnreachable, require_hub

logger = logging.getLogger(__name__)
BUILDERS = {Form.parquet: "parquet", Form.arrow: "arrow", Form.json: "json"}  # of `datasets`
NUM_NAMED = 3  # files in a message
PROMPT = "Describe it in detail."


class Rows(RowSource):
    """Rows of files in any layout; where the files are divided into splits, those of one of them."""

    def __init__(self, rows: RawRows, config: SourceConfig, roots: Roots, files: DataFiles | None = None) -> None:
        self._columns, self._files = config.columns, files
        to_messages = partial(table_messages, columns=config.columns, media_root=roots)
        id_key, family_key = config.columns.get("id", "id"), config.columns.get("family", "data_source")
        super().__init__(rows, to_messages, (config.columns, roots), id_key, "", family_key)
        self.has_splits = files is not None and files.has_splits

    def description(self) -> str:
        """Returns what was recognized: the format, the number of rows, and the layout of the first one."""
        try:
            layout = described(self.rows[0], self._columns) if len(self) else "empty"
        except BadItem as error:
            layout = error.reason
        form = self._files.described() if self._files else "table"
        return f"{self.name}: {form}, {len(self)} rows: {layout}"


class HubStream(Rows):
    """Rows of a hub data set in order, without a download."""

    def __init__(self, path: str, config: SourceConfig, root: str) -> None:
        super().__init__(RawRows(path, "", ()), config, root)
        self.subset, self.split = config.subset, config.split or "train"

    def iterate(self, start: int) -> Iterator[Conversation | BadItem]:
        table = load_table(self.name, self.subset, self.split, "", streaming=True).skip(start)
        if self.limit:
            table = table.take(max(0, self.limit - start))
        rows = iter(enumerate(table, start))
        while found := self._next(rows):
            try:
                yield self.convert(found[1], found[0])
            except BadItem as error:
                yield error

    def _next(self, rows: Iterator[tuple[int, Row]]) -> tuple[int, Row] | None:
        try:
            return next(rows, None)
        except (ValueError, RuntimeError) as error:  # of the readers of `datasets`, for an invalid row
            raise ValueError(f"{self.name}: a file cannot be streamed ({error}); read it without streaming") from error

    def fingerprint(self) -> str:
        return f"{self.name}:{self.subset}:{self.split}:{self.limit}:{self.settings}"


def table_rows(path: str, subset: str, split: str, cache_dir: str) -> RawRows:
    """Returns the rows of a table, images undecoded; raises ValueError: no such data set, configuration or split."""
    table = load_table(path, subset, split, cache_dir, streaming=False)
    return RawRows(path, str(table._fingerprint), table)


def load_table(path: str, subset: str, split: str, cache_dir: str, streaming: bool) -> Any:
    """Opens a `datasets` table (or stream) with images and videos undecoded, as {"bytes", "path"}; ValueError with name and
    cause if it cannot be found or read, or if `datasets` is not installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"data set {path}: package datasets is not installed; pip install 'sage-draft[data]'")
    import datasets

    cache = str(Path(cache_dir).expanduser() / "tables") if cache_dir else None
    try:
        files = find_files(path, subset)
        if files.form is Form.saved:
            table = datasets.load_from_disk(files.of(split)[0])
        elif files.form in BUILDERS:
            options: dict[str, Any] = {"split": split, "streaming": streaming, "cache_dir": cache}
            table = datasets.load_dataset(BUILDERS[files.form], data_files={split: list(files.of(split))}, **options)
        else:
            if cache is None or not (Path(cache) / path.replace("/", "___").lower()).exists():
                require_hub(path, "data.path")
            table = datasets.load_dataset(path, subset or None, split=split, streaming=streaming, cache_dir=cache)
    except HubUnreachable:
        raise
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:  # StopIteration: an empty file
        given = f"subset {subset!r}, split '{split}'"
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"data set {path}: {reason}; check path, subset and split (here {given})") from error
    for name, feature in (table.features or {}).items():
        if isinstance(feature, (datasets.Image, datasets.Video)):
            table = table.cast_column(name, type(feature)(decode=False))
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            table = table.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return table


class FolderSource(RowSource):
    """The images, frame folders and videos of a folder in the order of their names; those without a text are prompts only."""

    def __init__(self, path: str, prompt: str) -> None:
        paths = sorted(Path(path).iterdir())
        known = Image.registered_extensions()
        items = [{"id": item.name, "kind": kind, "path": str(item)} for item in paths if (kind := _kind(item, known))]
        if not items:
            remedy = f"give data=auto data.path={path}" if row_files(Path(path)) else "set data.path to another folder"
            raise ValueError(f"{path}: no image, frame folder or video in it; {remedy}")
        names = {Path(item["id"]).stem for item in items}
        unused = [file.name for file in paths if file.suffix == ".txt" and file.stem not in names]
        if unused:
            logger.warning("%s: %s without an image or video of that name: %s", path, *_listed(unused, "text file"))
        files = [file for item in items for file in (Path(item["path"]), _text_file(item)) if file.exists()]
        digest = str([(file.name, (s := file.stat()).st_size, s.st_mtime_ns) for file in files])
        super().__init__(RawRows(path, digest, items), partial(_folder_messages, prompt=prompt), prompt)

    def example(self, index: int) -> Conversation:
        conversation = self.conversation(index)
        if conversation.messages[-1]["role"] == "user":
            item = self.rows[index]
            frames = f"; if its files are separate images, give data.path={item['path']}" if os.path.isdir(item["path"]) else ""
            raise conversation.error(f"no text file; write the answer to {_text_file(item).name}{frames}")
        return as_example(conversation)


def _listed(names: list[str], kind: str) -> tuple[str, str]:
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return f"{len(names)} {kind}{'s' * (len(names) > 1)}", ", ".join(names[:NUM_NAMED]) + more


def _kind(item: Path, known: dict[str, str]) -> str:
    if item.is_dir():
        return "video" if frame_files(item) else ""
    if item.suffix.lower() in VIDEO_SUFFIXES:
        return "video"
    return "image" if item.suffix.lower() in known else ""


def _text_file(item: Row) -> Path:
    return Path(item["path"]).with_suffix(".txt")


def _folder_messages(item: Row, prompt: str) -> list[Message]:
    media, file = {"type": item["kind"], item["kind"]: item["path"]}, _text_file(item)
    messages = [{"role": "user", "content": [media, {"type": "text", "text": prompt}]}]
    if file.exists():
        try:
            text = file.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{file.name}: not UTF-8 at byte {error.start}") from error
        messages.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
    return messages


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str) -> Source:
    """Opens the rows of a path, or the images and videos of a folder without rows; a stream without a download."""
    if unknown := sorted(set(config.columns) - set(ROLES)):
        raise ValueError(f"data.sources.{label}.columns: role {unknown[0]!r}; allowed: {', '.join(ROLES)}")
    path, is_folder = config.path, config.kind == "folder"
    if config.streaming:
        return HubStream(path, config, config.media_root or (path if os.path.isdir(path) else os.path.dirname(path)))
    files = None if is_folder else find_files(path, config.subset)
    if files is None or (files.form is Form.media and config.kind == "auto"):
        return FolderSource(path, config.prompt or PROMPT)
    if unread := unread_files(files):
        logger.warning(
            "%s: %s not read, of another format or in a subfolder: %s; give a pattern", path, *_listed(unread, "file")
        )
    name = config.split or Split.train
    if not config.split and files.has_splits:  # validation and test stand in for one another
        name = split if split in files.splits else next(name for name in files.splits if name != Split.train)
    if files.form is Form.media:
        raise ValueError(f"{path}: no data file in it; for images with a text file each choose data=auto or data=folder")
    if files.form is Form.json:
        parts = [JsonRows(file, cache_dir) for file in files.of(name)]
        rows: RawRows = parts[0] if len(parts) == 1 else joined_rows(path, parts)
    else:
        rows = table_rows(path, config.subset, name, cache_dir)
    roots = (config.media_root, files.folder) if config.media_root else (files.folder,)
    return Rows(rows, config, roots, None if config.split else files)

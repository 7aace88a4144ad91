"""Conversations in rows: JSON files, tables with embedded images, data sets of the hub, folders written by `save_to_disk`.

The files of a path are found by `data_prep.sources.files`, the layout of their rows by `data_prep.sources.layouts`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from data_prep.conversation import BadItem, Conversation
from data_prep.sources.base import Source, Stream
from data_prep.sources.files import DataFiles, Form, find_files
from data_prep.sources.kinds import SourceConfig
from data_prep.sources.layouts import ROLES, Roots, described, table_messages
from data_prep.sources.rows import JoinedRows, JsonRows, RawRows, RowSource, require_path
from data_prep.splits import Split
from sage.io.hub import HubUnreachable, require_hub

BUILDERS = {Form.parquet: "parquet", Form.arrow: "arrow", Form.json: "json"}  # of `datasets`


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
            layout = described(self.rows.row(0), self._columns) if len(self) else "empty"
        except BadItem as error:
            layout = error.reason
        form = self._files.described() if self._files else "table"
        return f"{self.name}: {form}, {len(self)} rows: {layout}"


class HubStream(Stream):
    """Rows of a hub data set in order, without a download."""

    def __init__(self, source: RowSource, path: str, subset: str, split: str) -> None:
        self.name, self.source, self.subset, self.split = path, source, subset, split

    def iterate(self, start: int) -> Iterator[Conversation | BadItem]:
        table = load_table(self.name, self.subset, self.split, "", streaming=True).skip(start)
        if self.limit:
            table = table.take(max(0, self.limit - start))
        self.source.pixel_limits = self.pixel_limits
        for index, row in enumerate(table, start):
            try:
                yield self.source.convert(row, index)
            except BadItem as error:
                yield error

    def fingerprint(self) -> str:
        return f"{self.name}:{self.subset}:{self.split}:{self.limit}:{self.source.settings}"


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
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        given = f"subset {subset!r}, split {split!r}"
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"data set {path}: {reason}; check path, subset and split (here {given})") from error
    for name, feature in (table.features or {}).items():
        if isinstance(feature, (datasets.Image, datasets.Video)):
            table = table.cast_column(name, type(feature)(decode=False))
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            table = table.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return table


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str) -> Source | Stream:
    """Opens the rows of a path, or the images and videos of a folder without rows; a stream without a download."""
    if unknown := sorted(set(config.columns) - set(ROLES)):
        raise ValueError(f"data.sources.{label}.columns: role {unknown[0]!r}; allowed: {', '.join(ROLES)}")
    path = require_path(label, config.path, "files of conversations, a folder or a pattern of them, or a hub name")
    if config.streaming:
        root = config.media_root or (path if os.path.isdir(path) else os.path.dirname(path))
        source = Rows(RawRows(path, "", ()), config, root)  # rows are given to `convert`
        return HubStream(source, path, config.subset, config.split or "train")
    files = find_files(path, config.subset)
    if files.form is Form.media and config.kind == "auto":
        folder: Source = import_module("data_prep.sources.folder").open_source(label, config, split, cache_dir)
        return folder
    name = config.split or Split.train
    if not config.split and files.has_splits:  # validation and test stand in for one another
        name = split if split in files.splits else next(name for name in files.splits if name != Split.train)
    if files.form is Form.media:
        raise ValueError(f"{path}: no data file in it; for images with a text file each choose data=auto or data=folder")
    if files.form is Form.json:
        parts = [JsonRows(file, cache_dir) for file in files.of(name)]
        rows: RawRows = parts[0] if len(parts) == 1 else JoinedRows(path, parts)
    else:
        rows = table_rows(path, config.subset, name, cache_dir)
    roots = (config.media_root, files.folder) if config.media_root else (files.folder,)
    return Rows(rows, config, roots, None if config.split else files)

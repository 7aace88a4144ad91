"""Sources of rows: a container of raw rows, and a function that turns a row into messages."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from data_prep.conversation import BadItem, Conversation, Message, item_label
from data_prep.sources.base import Source
from data_prep.sources.json_rows import JsonRows, file_digest

Row = dict[str, Any]
ToMessages = Callable[[Row], list[Message]]


class RawRows(Protocol):
    """Raw rows by index."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> Any:
        """Returns a row; raises BadItem if it cannot be read."""


class RowSource(Source):
    """Rows of one file or data set, each turned into messages.

    Args:
        rows: the raw rows.
        to_messages: row -> messages; raises ValueError, KeyError or TypeError for a row of another layout, an unknown role or
            part, and different numbers of placeholders and files.
        settings: further settings that determine the result, for the fingerprint.
        id_key: key of a row's id; rows without it are numbered.
        family, family_key: task family of all rows, or the key of a row's family.
    """

    def __init__(
        self,
        rows: RawRows,
        to_messages: ToMessages,
        settings: Any = "",
        id_key: str = "id",
        family: str = "",
        family_key: str = "",
    ) -> None:
        self.rows, self.to_messages, self.settings = rows, to_messages, settings
        self.id_key, self.family, self.family_key = id_key, family, family_key
        self.name = rows.name

    def __len__(self) -> int:
        return len(self.rows)

    def conversation(self, index: int) -> Conversation:
        return self.convert(self.rows.row(index), index)

    def convert(self, row: Any, index: int) -> Conversation:
        """Turns a raw row into a conversation; BadItem with its index and id if it does not have this layout."""
        if not isinstance(row, dict):
            raise BadItem(self.name, index, f"not an object but {type(row).__name__}")
        name = row.get(self.id_key)
        try:
            family = str(row.get(self.family_key) or "") if self.family_key else self.family
            own_name = str(index) if name is None else str(name)
            return Conversation(own_name, self.to_messages(row), self.name, family, {"index": index})
        except KeyError as error:
            reason = f"no key {error}; is the layout that of the source's kind?"
            raise BadItem(self.name, item_label(index, name), reason) from error
        except (ValueError, TypeError, AttributeError) as error:
            raise BadItem(self.name, item_label(index, name), str(error)) from error

    def line_numbers(self, indices: Sequence[int]) -> dict[int, int]:
        return self.rows.line_numbers(indices) if isinstance(self.rows, JsonRows) else {}

    def fingerprint(self) -> str:
        return f"{self.rows.digest}:{self.settings}"


class ListRows:
    """Rows of a JSON file that fits in memory.

    Args:
        select: parsed file -> list of rows.

    Raises:
        ValueError: the file is not JSON, or contains no rows.
    """

    def __init__(self, path: str, select: Callable[[Any], Sequence[Row]]) -> None:
        self.name = path
        try:
            self._rows = list(select(json.loads(Path(path).read_bytes())))
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not in the layout of the source's kind ({error})") from error

    @cached_property
    def digest(self) -> str:
        return file_digest(Path(self.name))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Any:
        """Returns the row at `index`."""
        return self._rows[index]


class MediaFinder:
    """Locates the files that annotations name: below `root`, in given subfolders, or in any subfolder by file name."""

    def __init__(self, root: str) -> None:
        self.root = root

    def __call__(self, name: str, *folders: str, suffixes: Sequence[str] = ("",)) -> str:
        """Returns the path; `root/name` if there is no such file, so that opening it raises the error."""
        for folder in ("", *folders):
            for suffix in suffixes:
                path = os.path.join(self.root, folder, name + suffix)
                if os.path.exists(path):
                    return path
        found = (self._path_by_name.get(os.path.basename(name) + suffix) for suffix in suffixes)
        return next((path for path in found if path), os.path.join(self.root, name + suffixes[0]))

    @cached_property
    def _path_by_name(self) -> dict[str, str]:
        return {
            name: os.path.join(folder, name)
            for folder, folders, files in os.walk(self.root)
            for name in sorted(files + folders)
        }


def require_path(label: str, path: str, description: str) -> str:
    """Returns the path; raises ValueError with the key to set if it is empty."""
    if not path:
        raise ValueError(f"data.sources.{label}.path: empty; set it (or data.path) to {description}")
    return path

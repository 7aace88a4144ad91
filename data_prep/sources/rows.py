"""Sources made of rows: something that holds rows, and a function from a row to messages."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from data_prep.conversation import BadItem, Conversation, Message
from data_prep.sources.base import Source
from data_prep.sources.json_rows import file_digest

Row = dict[str, Any]
ToMessages = Callable[[Row], list[Message]]


class Rows(Protocol):
    """Raw rows by index."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> Any:
        """The row; BadItem where it cannot be read."""


class RowSource(Source):
    """Rows of one file or data set, each turned into messages.

    Args:
        rows: where they come from.
        to_messages: row -> messages; raises ValueError, KeyError or TypeError on what is not such a row.
        settings: what else decides the outcome (for the fingerprint).
        id_key: where a row has its id; rows are numbered where they have none.
        family, family_key: task family of all rows, or where a row has it.
    """

    def __init__(
        self,
        rows: Rows,
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
        """A raw row -> conversation.

        Raises:
            BadItem: it is no row of this layout.
        """
        if not isinstance(row, dict):
            raise BadItem(self.name, index, f"not an object but {type(row).__name__}")
        try:
            messages = self.to_messages(row)
            name = str(row[self.id_key]) if row.get(self.id_key) is not None else str(index)
            family = str(row.get(self.family_key) or "") if self.family_key else self.family
            return Conversation(name, messages, self.name, family, {"index": index})
        except KeyError as error:
            raise BadItem(self.name, index, f"no key {error}; is this the layout it should be?") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise BadItem(self.name, index, str(error)) from error

    def fingerprint(self) -> str:
        return f"{self.rows.digest}:{self.settings}"


class ListRows:
    """Rows that fit in memory, from a JSON file whose rows lie under a key or are named by one.

    Args:
        pick: the parsed file -> rows.

    Raises:
        ValueError: no such file, not JSON, or no rows in it.
    """

    def __init__(self, path: str, pick: Callable[[Any], Sequence[Row]]) -> None:
        if not os.path.isfile(path):
            raise ValueError(f"{path}: no such file; set data.path (or data.sources.NAME.path) to the layout's file")
        self.name = path
        try:
            self._rows = list(pick(json.loads(Path(path).read_bytes())))
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not in the layout it should have ({error})") from error

    @cached_property
    def digest(self) -> str:
        return file_digest(Path(self.name))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Any:
        """The row at `index`."""
        return self._rows[index]


class MediaFinder:
    """Finds the files that annotations name: below `root`, in a named folder, or wherever a file of that name lies."""

    def __init__(self, root: str) -> None:
        self.root = root

    def __call__(self, name: str, *folders: str, suffixes: Sequence[str] = ("",)) -> str:
        """The path; the plain `root/name` where there is no such file (opening it will say so)."""
        for folder in ("", *folders):
            for suffix in suffixes:
                path = os.path.join(self.root, folder, name + suffix)
                if os.path.exists(path):
                    return path
        found = (self._by_name.get(os.path.basename(name) + suffix) for suffix in suffixes)
        return next((path for path in found if path), os.path.join(self.root, name + suffixes[0]))

    @cached_property
    def _by_name(self) -> dict[str, str]:
        return {
            name: os.path.join(folder, name)
            for folder, folders, files in os.walk(self.root)
            for name in sorted(files + folders)
        }


def need_path(label: str, path: str, what: str) -> str:
    """The path, or the error that says which key to set."""
    if not path:
        raise ValueError(f"data.sources.{label}.path: empty; set it (or data.path) to {what}")
    return path

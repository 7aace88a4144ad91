"""Raw rows of data files, and sources of rows: a container of raw rows, and a function that turns a row into messages.

`JsonRows` reads the objects of a JSON array or a JSON-lines file on disk by index. Their byte ranges are cached under the
file's hash, so that a file of a million rows opens immediately the second time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data_prep.cache import cache_dir, computed_once
from data_prep.conversation import BadItem, Conversation, Message, Row, item_label
from data_prep.sources import is_array
from data_prep.sources.base import Source

ToMessages = Callable[[Row], list[Message]]
CHUNK_BYTES = 1 << 24


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


def require_path(label: str, path: str, description: str) -> str:
    """Returns the path; raises ValueError with the key to set if it is empty."""
    if not path:
        raise ValueError(f"data.sources.{label}.path: empty; set it (or data.path) to {description}")
    return path


# -- random access to the objects of a JSON file -------------------------------------------------------------------------


class JsonRows:
    """The objects of one file.

    Args:
        path: a JSON array, or one object per line; the content decides, not the suffix.

    Raises:
        ValueError: an array that is not complete (an invalid *line* is an error of that item).
    """

    def __init__(self, path: str, configured_cache: str = "") -> None:
        self.path = Path(path)
        self.name = path
        self.digest = file_digest(self.path)
        cached = cache_dir(configured_cache) / "rows" / f"{self.digest[:24]}.npy"
        with computed_once(cached, self._write_spans):
            self.spans = np.load(cached, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.spans)

    def row(self, index: int) -> Any:
        """Returns the object at `index`; raises BadItem: not valid UTF-8 or not valid JSON."""
        begin, end = (int(bound) for bound in self.spans[index])
        with self.path.open("rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
        try:
            return json.loads(data)
        except UnicodeDecodeError as error:
            raise self.error(index, f"not UTF-8 at byte {begin + error.start}") from error
        except json.JSONDecodeError as error:
            fault = error.msg.removesuffix(" at")
            raise self.error(index, f"not valid JSON ({fault}, at character {error.pos} of the item)") from error

    def line_numbers(self, indices: Sequence[int]) -> dict[int, int]:
        """Returns the number of the line, from 1 on, in which each of some objects begins."""
        begins = sorted((int(self.spans[index][0]), index) for index in indices)
        found, line, place = {}, 1, 0
        with self.path.open("rb") as file:
            for begin, index in begins:
                while place < begin:
                    chunk = file.read(min(CHUNK_BYTES, begin - place))
                    line, place = line + chunk.count(b"\n"), place + len(chunk)
                found[index] = line
        return found

    def error(self, index: int, reason: str) -> BadItem:
        """Returns the error that names this file and item."""
        return BadItem(str(self.path), index, reason)

    def _write_spans(self, path: Path) -> None:
        spans = _array_spans(self.path) if is_array(self.path) else _line_spans(self.path)
        with path.open("wb") as file:
            np.save(file, np.asarray(spans, dtype=np.int64).reshape(-1, 2))


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file's suffix and content."""
    digest = hashlib.sha256(path.suffix.encode())
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _line_spans(path: Path) -> list[tuple[int, int]]:
    spans, begin = [], 0
    with path.open("rb") as file:
        for line in file:
            end = begin + len(line)
            if line.strip():
                spans.append((begin, end))
            begin = end
    return spans


def _array_spans(path: Path) -> list[tuple[int, int]]:
    """Returns the byte ranges of an array's elements. Latin-1 maps every byte to one character, so positions are bytes."""
    text = path.read_bytes().decode("latin-1")
    decoder = json.JSONDecoder()
    spans = []
    position = _skip_blanks(text, text.index("[") + 1)
    try:
        while text[position : position + 1] != "]":
            _, end = decoder.raw_decode(text, position)
            spans.append((position, end))
            position = _skip_blanks(text, end)
            if text[position : position + 1] not in (",", "]"):
                raise json.JSONDecodeError("expected ',' or ']'", text, position)
            position = _skip_blanks(text, position + 1) if text[position] == "," else position
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: the JSON array is incomplete or invalid ({error.msg} in line {error.lineno}, after {len(spans)} complete "
            f"items); repair the file, or write it again"
        ) from error
    return spans


def _skip_blanks(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\t", "\r", "\n") and position < len(text):
        position += 1
    return position

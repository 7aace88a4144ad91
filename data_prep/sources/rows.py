"""Raw rows of data files by index, and sources of rows, which turn each of them into messages.

`JsonRows` reads the objects of a JSON array or a JSON-lines file on disk by index. Their byte ranges are cached under the
file's hash, so that a file of a million rows opens immediately the second time.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from data_prep.cache import cache_dir, computed_once
from data_prep.conversation import BadItem, Conversation, Message, Row, item_label, printable
from data_prep.sources.base import Source
from data_prep.sources.files import GZIP, read_head
from sage.inputs.messages import check_messages
from sage.io.files import atomic_path

CHUNK_BYTES = 1 << 24
BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
ROW_FAULTS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)


class RawRows(Dataset[Any]):
    """Raw rows by index, of a list or a table; `digest` changes whenever they change."""

    def __init__(self, name: str, digest: str, rows: Any) -> None:
        self.name, self.digest, self._rows = name, digest, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        """Returns a row; raises BadItem if it cannot be read."""
        return self._rows[index]


@dataclass(eq=False, repr=False)
class RowSource(Source):
    """Rows of one file or data set, each turned into messages.

    Attributes:
        to_messages: row -> messages; raises one of `ROW_FAULTS` for a row of another layout.
        settings: further settings that determine the result, for the fingerprint.
        id_key: key of a row's id; rows without it are numbered.
        family, family_key: task family of all rows, or the key of a row's family.
    """

    rows: RawRows
    to_messages: Callable[[Row], list[Message]]
    settings: Any = ""
    id_key: str = "id"
    family: str = ""
    family_key: str = ""

    def __post_init__(self) -> None:
        self.name = self.rows.name

    def __len__(self) -> int:
        return len(self.rows)

    def conversation(self, index: int) -> Conversation:
        return self.convert(self.rows[index], index)

    def convert(self, row: Any, index: int) -> Conversation:
        """Turns a raw row into a conversation; BadItem with its index and id if it does not have this layout."""
        if not isinstance(row, dict):
            raise BadItem(self.name, index, f"not an object but {type(row).__name__}")
        name = row.get(self.id_key)
        try:
            family = str(row.get(self.family_key) or "") if self.family_key else self.family
            label = printable(str(index) if name is None else str(name))
            check_messages(messages := [self._limited(message) for message in self.to_messages(row)])
            return Conversation(label, messages, self.name, printable(family), {"index": index})
        except ROW_FAULTS as error:
            is_missing_key = isinstance(error, KeyError)
            reason = f"no key {error}; is the layout that of the source's kind?" if is_missing_key else str(error)
            raise BadItem(self.name, item_label(index, name), reason) from error

    def fingerprint(self) -> str:
        limits = f":{dict(self.pixel_limits)}" if self.pixel_limits else ""
        return f"{self.rows.digest}:{self.settings}{limits}"

    def _limited(self, message: Message) -> Message:
        """Returns a message whose images have the limits of the source, where they have none of their own."""
        if not isinstance(message["content"], list):
            return message
        parts = [{**self.pixel_limits, **part} if part.get("type") == "image" else part for part in message["content"]]
        return message | {"content": parts}


# -- random access to the objects of a JSON file -------------------------------------------------------------------------


class JsonRows(RawRows):
    """The objects of one file: a JSON array, or one per line, maybe compressed with gzip; the content decides, not the suffix.

    ValueError for an array that is not complete (an invalid *line* is an error of that item).
    """

    def __init__(self, path: str, configured_cache: str = "") -> None:
        self.path, digest = Path(path), file_digest(Path(path))
        cached = cache_dir(configured_cache) / "rows" / f"{digest[:24]}.npy"
        with self.path.open("rb") as file:
            is_packed = file.read(len(GZIP)) == GZIP
        if is_packed:
            packed, self.path = self.path, cached.with_suffix(".json")
            with computed_once(self.path, lambda unpacked: _unpack(packed, unpacked), replacing=atomic_path):
                pass
        with computed_once(cached, self._write_spans, replacing=atomic_path):
            super().__init__(path, digest, np.load(cached, mmap_mode="r"))

    def __getitem__(self, index: int) -> Any:
        """Returns the object at `index`; raises BadItem: not valid UTF-8 or not valid JSON."""
        begin, end = (int(bound) for bound in self._rows[index])
        with self.path.open("rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
        try:
            return json.loads(data)
        except UnicodeDecodeError as error:
            raise BadItem(self.name, index, f"not UTF-8 at byte {begin + error.start}") from error
        except json.JSONDecodeError as error:
            fault = error.msg.removesuffix(" at")
            raise BadItem(self.name, index, f"not valid JSON ({fault}, at character {error.pos} of the item)") from error
        except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
            raise BadItem(self.name, index, f"JSON that cannot be read ({error})") from error

    def line_numbers(self, indices: Sequence[int]) -> dict[int, int]:
        """Returns the line of the file in which each of some objects begins, from 1 on."""
        begins = sorted((int(self._rows[index][0]), index) for index in indices)
        lines, line, position = {}, 1, 0
        with self.path.open("rb") as file:
            for begin, index in begins:
                while position < begin:
                    chunk = file.read(min(CHUNK_BYTES, begin - position))
                    line, position = line + chunk.count(b"\n"), position + len(chunk)
                lines[index] = line
        return lines

    def _write_spans(self, path: Path) -> None:
        spans = _array_spans(self.path) if read_head(self.path).startswith(b"[") else _line_spans(self.path)
        with path.open("wb") as file:
            np.save(file, np.asarray(spans, dtype=np.int64).reshape(-1, 2))


def joined_rows(name: str, files: Sequence[JsonRows]) -> RawRows:
    """Returns the objects of several files in order; the error of one that cannot be read names its file and index there."""
    return RawRows(name, hashlib.sha256("".join(file.digest for file in files).encode()).hexdigest(), ConcatDataset(files))


def _unpack(packed: Path, unpacked: Path) -> None:
    try:
        with gzip.open(packed) as source, unpacked.open("wb") as file:
            shutil.copyfileobj(source, file, CHUNK_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{packed}: not a complete gzip file ({error}); write it again") from error


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file's suffix and content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.sha256(path.suffix.encode())).hexdigest()


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
            end = _end_of_value(decoder, text, position)
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


def _end_of_value(decoder: json.JSONDecoder, text: str, position: int) -> int:
    """Returns where a JSON value ends, also of an invalid item (too deep, or with a huge number)."""
    try:
        return decoder.raw_decode(text, position)[1]
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError):
        depth = 0
        for match in BRACKET.finditer(text, position):
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match.group(), 0)
            if not depth:
                return match.end()
    raise json.JSONDecodeError("brackets that do not end", text, position)


def _skip_blanks(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\t", "\r", "\n") and position < len(text):
        position += 1
    return position

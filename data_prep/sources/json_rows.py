"""Random access to the objects of a JSON array or a JSON-lines file on disk.

Owns: the byte range of each object, decoding, the errors of invalid objects. The byte ranges are cached under the file's hash,
so that a file of a million rows opens immediately the second time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.cache import cache_dir, computed_once
from data_prep.conversation import BadItem
from data_prep.sources.paths import is_array

CHUNK_BYTES = 1 << 24


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

"""Checks of the paths of sources before anything is loaded: a missing path, a folder in place of a file, another format.

Reads the first bytes of a file at most and imports no torch. Does not own: the rows of a file (the module of each kind).
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

from data_prep.sources import KINDS, Content

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
BOM = b"\xef\xbb\xbf"
HEAD_BYTES = 4096
PACKED = {
    b"PAR1": "Parquet; choose data=hub",
    b"\x1f\x8b": "compressed with gzip; unpack it",
    b"PK": "a zip archive; unpack it",
}


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

"""The kinds of sources, the configuration of one, and the files of its path: their format and their splits.

Adding a source is one module with `open_source` (see `base.Source`; with `iterate` where it supports `streaming`) and one entry
in `KINDS`; a prompt set is one entry in `prompt_sets.LAYOUTS`, and its name here. Paths are checked before anything is loaded,
and of a file at most the first bytes are read.
"""

from __future__ import annotations

import difflib
import glob
import gzip
import json
import os
import re
import zlib
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path

from sage.io.ranges import NonNegativeInt, PositiveFloat, PositiveInt

ALWAYS_USED = ("kind", "weight", "num_examples")  # fields of `SourceConfig`


class Content(StrEnum):
    """The content that `path` must have."""

    none = "none"  # there is no path
    folder = "folder"
    rows = "rows"  # JSON or table files, a folder or a pattern of them, or OWNER/NAME on the hub
    table = "table"  # the same, or any name on the hub
    any = "any"  # a hub name, or anything that exists


@dataclass(frozen=True)
class Kind:
    """A source format."""

    module: str  # that reads it, imported on first use (`datasets` takes seconds to import)
    options: tuple[str, ...] = ("path", "media_root")  # fields of `SourceConfig` that it uses, besides `ALWAYS_USED`
    content: Content = Content.none


@dataclass(kw_only=True)
class SourceConfig:
    """One source of conversations.

    Attributes:
        kind: a name in `KINDS`.
        path: file, folder, pattern such as `shards/*.jsonl`, or hub name.
        media_root: base folder of relative image and video paths (default: the folder of the file).
        subset: hub configuration name.
        split: split of a data set; empty: the training split, and its own held-out ones (prompt sets: the test split).
        columns: role -> column; see data_prep.sources.layouts.
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
_ROW_OPTIONS = ("path", "media_root", "subset", "split", "columns", "streaming")
_ROWS = Kind("data_prep.sources.hub", (*_ROW_OPTIONS, "prompt"), Content.rows)
_TABLE = Kind("data_prep.sources.hub", _ROW_OPTIONS, Content.table)
KINDS = {
    "auto": _ROWS,
    "pocket": Kind("data_prep.pocket.world", ("families", "joined")),
    **dict.fromkeys(("llava_json", "sharegpt", "messages"), _ROWS),  # the layout of a row is recognized by its keys
    **dict.fromkeys(("llava_onevision", "hub"), _TABLE),
    "folder": Kind("data_prep.sources.hub", ("path", "prompt"), Content.folder),
    **dict.fromkeys(("textvqa", "gqa", "chartqa", "seed_bench"), _PROMPT_SET),
    **dict.fromkeys(("mvbench", "video_detail_caption", "mmspec"), _PROMPT_SET),
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


# -- files -----------------------------------------------------------------------------------------------------------------

LINES_SUFFIXES = (".jsonl", ".ndjson")
JSON_SUFFIXES = (*LINES_SUFFIXES, ".json")
TABLE_SUFFIXES = (".parquet", ".arrow")
SUFFIXES = (*TABLE_SUFFIXES, *JSON_SUFFIXES)
BOM = b"\xef\xbb\xbf"
GZIP, PARQUET, ZIP = b"\x1f\x8b", b"PAR1", b"PK\x03\x04"
HEAD_BYTES = 4096
HELD_OUT = re.compile(r"(?:\A|[-_.])(validation|valid|val|dev|eval|test)(?:[-_.]|\Z)")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
ALL = ""  # the split of files that are not divided


class Form(StrEnum):
    """The format of data files."""

    json = "JSON"
    parquet = "Parquet"
    arrow = "Arrow"
    saved = "save_to_disk"
    hub = "Hugging Face data set"  # a name, or a folder whose README.md declares configurations and splits
    media = "images and videos with text files"


@dataclass(frozen=True)
class DataFiles:
    """The files of `path` by split: `train`, `validation`, `test`, or all of them as `ALL`."""

    path: str
    form: Form
    splits: dict[str, tuple[str, ...]]

    @property
    def has_splits(self) -> bool:
        return "train" in self.splits and len(self.splits) > 1

    @property
    def folder(self) -> str:
        """The folder that relative image paths start from."""
        first = next(iter(self.splits.values()))[0]
        return self.path if os.path.isdir(self.path) else os.path.dirname(first)

    def of(self, split: str) -> tuple[str, ...]:
        """Returns the files of a split; ValueError names those that exist."""
        files = self.splits.get(split) or self.splits.get(ALL)
        if not files:
            names = ", ".join(self.splits)
            raise ValueError(f"{self.path}: no split '{split}'; it has {names}; choose one as data.sources.NAME.split")
        return files

    def described(self) -> str:
        count = sum(map(len, self.splits.values()))
        names = ", ".join(filter(None, self.splits))
        return f"{self.form}, {count} file{'s' * (count > 1)}" + (f" ({names})" if names else "")


def find_files(path: str, subset: str = "") -> DataFiles:
    """Returns the files of a path; ValueError if there is none that can be read."""
    folder = Path(path)
    if not os.path.exists(path) and glob.has_magic(path):
        found = [row_files(Path(item)) if os.path.isdir(item) else [item] for item in sorted(glob.glob(path, recursive=True))]
        if not (files := list(dict.fromkeys(file for part in found for file in part))):
            raise ValueError(f"{path}: no file of this pattern in {Path.cwd()}; set data.path to the data")
        return _of_files(path, files)
    if os.path.isfile(path):
        return DataFiles(path, _form(path), {ALL: (path,)})
    if (folder / "dataset_dict.json").exists():
        names = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        known = {name: _split_name(name) or ("train" if name.startswith("train") else name) for name in names}
        is_clear = len(set(known.values())) == len(names)
        labels = {names[0]: ALL} if len(names) == 1 else known if is_clear else {name: name for name in names}
        return DataFiles(path, Form.saved, {labels[name]: (os.path.join(path, name),) for name in names})
    if (folder / "dataset_info.json").exists():
        return DataFiles(path, Form.saved, {ALL: (path,)})
    if not os.path.exists(path) or ((folder / "README.md").exists() and any(folder.rglob("*.parquet"))):
        return DataFiles(path, Form.hub, {ALL: (path,)})
    if subset and not (folder / subset).is_dir():
        raise ValueError(f"{path}: no folder {subset!r} in it")
    return _of_files(path, row_files(folder / subset), folder / subset)


def row_files(folder: Path) -> list[str]:
    """Returns the data files in a folder, of one format; those of its subfolders where it has none itself."""
    for items in (folder.iterdir(), folder.rglob("*")):
        files = sorted(str(item) for item in items if item.is_file() and not item.name.startswith("."))
        files = [file for file in files if not file.endswith(".skipped.jsonl")]
        for suffixes in (*TABLE_SUFFIXES, JSON_SUFFIXES):
            matching = [file for file in files if _has_suffix(file, suffixes)]
            if any(_has_suffix(file, LINES_SUFFIXES) for file in matching):  # then a single object is no data, but a setting
                matching = [file for file in matching if _has_suffix(file, LINES_SUFFIXES) or read_head(Path(file))[:1] == b"["]
            if matching:
                return matching
    return []


def unread_files(files: DataFiles) -> list[str]:
    """Returns the files of rows in a folder that are not read, since others are of another format, or not in a subfolder."""
    if files.form not in (Form.json, Form.parquet, Form.arrow) or not os.path.isdir(files.path):
        return []
    read = {file for part in files.splits.values() for file in part}
    found = map(str, sorted(Path(files.path).rglob("*")))
    return [file for file in found if _has_suffix(file, (*TABLE_SUFFIXES, *LINES_SUFFIXES)) and file not in read]


def _has_suffix(file: str, suffixes: str | tuple[str, ...]) -> bool:
    return file.lower().removesuffix(".gz").endswith(suffixes)


def _of_files(path: str, files: list[str], folder: Path | None = None) -> DataFiles:
    """Returns files divided into splits by their names in a folder."""
    if not files:
        return DataFiles(path, Form.media, {ALL: (path,)})
    splits: dict[str, list[str]] = {}
    for file in files:
        parts = Path(file).relative_to(folder).parts if folder else ()
        splits.setdefault(next(filter(None, map(_split_name, parts)), "train"), []).append(file)
    if set(splits) == {"train"}:
        splits = {ALL: files}
    return DataFiles(path, _form(files[0]), {name: tuple(part) for name, part in splits.items()})


def _split_name(name: str) -> str:
    """Returns `validation` or `test` for the name of a held-out file or split, else ""."""
    match = HELD_OUT.search(name.lower())
    return "" if not match else "test" if match[1] == "test" else "validation"


def _form(file: str) -> Form:
    if file.lower().endswith(".arrow"):
        return Form.arrow
    return Form.parquet if read_head(Path(file)).startswith(PARQUET) or file.lower().endswith(".parquet") else Form.json


# -- checks ------------------------------------------------------------------------------------------------------------------


def check_path(kind: str, path: str) -> None:
    """Checks that a path exists and has content that the kind reads; a name on the hub passes."""
    content = KINDS[kind].content
    if content is Content.none or is_hub_name(kind, path):
        return
    is_rows = content in (Content.rows, Content.table)
    if not os.path.exists(path) and not (is_rows and glob.has_magic(path)):
        raise ValueError(f"{path}: no such file or folder{_similar(path)}")
    if is_rows:
        files = find_files(path)
        if files.form is Form.json:
            check_json(Path(next(iter(files.splits.values()))[0]))
    elif content is Content.folder and not os.path.isdir(path):
        choice = "choose data=auto" if path.lower().endswith(SUFFIXES) else "give the folder"
        raise ValueError(f"{path}: a file, not a folder; data=folder reads images, each with a text file of its name; {choice}")


def is_hub_name(kind: str, path: str) -> bool:
    """Returns whether a path that does not exist here is a name on the hub."""
    content = KINDS[kind].content
    if os.path.exists(path) or path.startswith((".", "/")) or path.endswith(SUFFIXES) or glob.has_magic(path):
        return False
    if content is Content.rows:
        return bool(HUB_NAME.fullmatch(path)) and not os.path.isdir(os.path.dirname(path))
    return content in (Content.table, Content.any) and path.count("/") <= 1


def check_json(path: Path) -> None:
    """Raises ValueError, with what to give instead, unless a file begins like a JSON array or JSON Lines."""
    head = read_head(path)
    if not head:
        raise ValueError(f"{path}: empty; give one JSON object per line, or an array of them")
    if head.startswith(ZIP):
        raise ValueError(f"{path}: not JSON but a zip archive; unpack it")
    if head[:1] not in (b"[", b"{"):
        shown = head.splitlines()[0][:30].decode("utf-8", "replace")
        raise ValueError(f"{path}: not JSON, it begins with {shown!r}; give one JSON object per line, or an array of them")
    if head.splitlines()[0].strip() == b"{":
        raise ValueError(f"{path}: one JSON object over several lines; give one object per line, or an array of them")


def read_head(path: Path) -> bytes:
    """Returns the first bytes of a file, unpacked, without blanks before them."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(GZIP):
        try:
            with gzip.open(path) as unpacked:
                head = unpacked.read(HEAD_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: not a complete gzip file ({error}); write it again") from error
    return head.removeprefix(BOM).lstrip()


def _similar(path: str) -> str:
    """Returns where a missing path was searched, and the name there that is most like it."""
    missing = Path(path).absolute()
    if not missing.parent.is_dir():
        return f"; there is no folder {missing.parent}; set data.path to the data"
    names = difflib.get_close_matches(missing.name, sorted(item.name for item in missing.parent.iterdir()), 1, 0.75)
    suggestion = f"did you mean {Path(path).parent / names[0]}?" if names else "set data.path to the data"
    return f" in {missing.parent}; {suggestion}"

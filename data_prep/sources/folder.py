"""A folder of images, frame folders and video files, each with its answer in a text file of the same name.

    cat.jpg      cat.txt         an image and its description
    street/      street.txt      a folder of frames, in the order of their names
    park.mp4     park.txt        a video file, if a reader is installed

The question is `prompt`. A folder without texts provides prompts, also for regeneration, but no training examples.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from PIL import Image

from data_prep.config import SourceConfig
from data_prep.conversation import BadItem, Message
from data_prep.sources.base import Source
from data_prep.sources.rows import Row, RowSource, require_path
from data_prep.splits import Split
from sage.inputs.media import frame_files
from sage.inputs.video import VIDEO_SUFFIXES

PROMPT = "Describe it in detail."


class FolderRows:
    """The items of a folder in the order of their names: {"id", "kind", "path", "text"}."""

    def __init__(self, path: str) -> None:
        self.name = path
        folder = Path(path)
        if not folder.is_dir():
            raise ValueError(f"{path}: no such folder; set data.path to a folder of images, frame folders or videos")
        known = Image.registered_extensions()
        self.items = [(item, kind) for item in sorted(folder.iterdir()) if (kind := _kind(item, known))]
        if not self.items:
            raise ValueError(f"{path}: no image, frame folder or video in it")

    @property
    def digest(self) -> str:
        """Names, sizes and modification times of the files."""
        files = [path for item, _ in self.items for path in (item, item.with_suffix(".txt")) if path.exists()]
        return str([(file.name, (s := file.stat()).st_size, s.st_mtime_ns) for file in files])

    def __len__(self) -> int:
        return len(self.items)

    def row(self, index: int) -> Row:
        """Returns an item with its text, None if there is none; raises BadItem if the text is not UTF-8."""
        item, kind = self.items[index]
        text = item.with_suffix(".txt")
        try:
            answer = text.read_text(encoding="utf-8").strip() if text.exists() else None
        except UnicodeDecodeError as error:
            raise BadItem(self.name, index, f"{text.name}: not UTF-8 at byte {error.start}") from error
        return {"id": item.name, "kind": kind, "path": str(item), "text": answer}


def _kind(item: Path, known: dict[str, str]) -> str:
    if item.is_dir():
        return "video" if frame_files(item) else ""
    if item.suffix.lower() in VIDEO_SUFFIXES:
        return "video"
    return "image" if item.suffix.lower() in known else ""


def folder_messages(row: Row, prompt: str) -> list[Message]:
    """Returns the image or video with the question and, if there is a text, the answer."""
    media = {"type": row["kind"], row["kind"]: row["path"]}
    messages = [{"role": "user", "content": [media, {"type": "text", "text": prompt}]}]
    if row["text"] is not None:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": row["text"]}]})
    return messages


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str) -> Source:
    """Opens one folder."""
    path = require_path(label, config.path, "the folder")
    prompt = config.prompt or PROMPT
    return RowSource(FolderRows(path), partial(folder_messages, prompt=prompt), prompt)

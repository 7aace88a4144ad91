"""A folder of images, frame folders and video files, each with its answer in a text file of the same name.

    cat.jpg      cat.txt         an image and its description
    street/      street.txt      a folder of frames, in the order of their names
    park.mp4     park.txt        a video file, if a reader is installed

The question is `prompt`. A folder without texts provides prompts, also for regeneration, but no training examples.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from PIL import Image

from data_prep.conversation import BadItem, Conversation, Message, Row
from data_prep.sources.base import Source, as_example
from data_prep.sources.files import row_files
from data_prep.sources.kinds import SourceConfig
from data_prep.sources.rows import RawRows, RowSource, require_path
from data_prep.splits import Split
from sage.inputs.media import frame_files
from sage.inputs.video import VIDEO_SUFFIXES

logger = logging.getLogger(__name__)
NUM_NAMED = 3  # files in a message
PROMPT = "Describe it in detail."


class FolderRows(RawRows):
    """The items of a folder in the order of their names: {"id", "kind", "path", "text"}."""

    def __init__(self, path: str) -> None:
        paths = sorted(Path(path).iterdir())
        known = Image.registered_extensions()
        items = [(item, kind) for item in paths if (kind := _kind(item, known))]
        if not items:
            remedy = f"give data=auto data.path={path}" if row_files(Path(path)) else "set data.path to another folder"
            raise ValueError(f"{path}: no image, frame folder or video in it; {remedy}")
        names = {item.stem for item, _ in items}
        unused = [file.name for file in paths if file.suffix == ".txt" and file.stem not in names]
        if unused:
            more = f" and {len(unused) - NUM_NAMED} more" if len(unused) > NUM_NAMED else ""
            named = ", ".join(unused[:NUM_NAMED]) + more
            logger.warning("%s: %d text file(s) without an image or video of that name: %s", path, len(unused), named)
        files = [file for item, _ in items for file in (item, item.with_suffix(".txt")) if file.exists()]
        digest = str([(file.name, (s := file.stat()).st_size, s.st_mtime_ns) for file in files])
        super().__init__(path, digest, items)

    def row(self, index: int) -> Row:
        """Returns an item with its text, None if there is none; raises BadItem if the text is not UTF-8."""
        item, kind = self._rows[index]
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


class FolderSource(RowSource):
    """The items of a folder; those without a text are prompts only."""

    def example(self, index: int) -> Conversation:
        conversation = self.conversation(index)
        if conversation.messages[-1]["role"] == "user":
            item = Path(self.rows.row(index)["path"])
            reason = f"no text file; write the answer to {item.with_suffix('.txt').name}"
            frames = f"; if its files are separate images, give data.path={item}" if item.is_dir() else ""
            raise conversation.error(reason + frames)
        return as_example(conversation)


def _messages(row: Row, prompt: str) -> list[Message]:
    media = {"type": row["kind"], row["kind"]: row["path"]}
    messages = [{"role": "user", "content": [media, {"type": "text", "text": prompt}]}]
    if row["text"] is not None:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": row["text"]}]})
    return messages


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str) -> Source:
    prompt = config.prompt or PROMPT
    rows = FolderRows(require_path(label, config.path, "the folder"))
    return FolderSource(rows, partial(_messages, prompt=prompt), prompt)

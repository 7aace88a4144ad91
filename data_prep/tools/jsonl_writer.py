"""Conversations as lines of a file any tool can read: `messages` rows with the pictures beside them.

Owns: writing what `data_prep.sources.messages` reads. Pictures that are files stay where they are; drawn or embedded ones
go into a folder beside the file, named by content, each once.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

from PIL import Image

from data_prep.conversation import Conversation, Message, Part
from data_prep.files import atomic_path
from sage.inputs.media import open_picture
from sage.inputs.video import CLIP_KEYS


class MediaFolder:
    """Where the pictures of a row file go.

    Args:
        row_file: `rows.jsonl` keeps its pictures in `rows_media/`.
    """

    def __init__(self, row_file: Path) -> None:
        self.root = row_file.parent
        self.folder = row_file.parent / f"{row_file.stem}_media"

    def keep(self, value: Any) -> str:
        """A picture -> the path to write into the row, relative to the row file where it was written by us."""
        if isinstance(value, (str, Path)) and not str(value).startswith("data:"):
            return str(Path(value).absolute())
        data = value if isinstance(value, bytes) else _png(value)
        return self._write(data, ".bin" if isinstance(value, bytes) else ".png")

    def keep_clip(self, value: Any) -> Any:
        """A clip -> path of its folder or file, or the paths of its frames."""
        return [self.keep(frame) for frame in value] if isinstance(value, (list, tuple)) else self.keep(value)

    def _write(self, data: bytes, suffix: str) -> str:
        name = hashlib.sha256(data).hexdigest()[:32] + suffix
        path = self.folder / name
        if not path.exists():
            with atomic_path(path) as temporary:
                temporary.write_bytes(data)
        return os.path.join(self.folder.name, name)


def messages_as_json(messages: list[Message], media: MediaFolder) -> list[dict[str, Any]]:
    """Messages with every picture kept and named by its path."""
    return [{"role": m["role"], "content": [_part_as_json(part, media) for part in m["content"]]} for m in messages]


def as_line(conversation: Conversation, media: MediaFolder, **extra: Any) -> str:
    """One line of the file, without its end."""
    row = {"id": conversation.id, "source": conversation.source, "family": conversation.family}
    return json.dumps({**row, "messages": messages_as_json(conversation.messages, media), **extra}, ensure_ascii=False)


def _part_as_json(part: Part, media: MediaFolder) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    kept = media.keep(part["image"]) if part["type"] == "image" else media.keep_clip(part["video"])
    return {"type": part["type"], part["type"]: kept, **{key: part[key] for key in CLIP_KEYS if key in part}}


def _png(picture: Any) -> bytes:
    stream = io.BytesIO()
    found = picture if isinstance(picture, Image.Image) and picture.mode == "RGB" else open_picture(picture)
    found.save(stream, "PNG")
    return stream.getvalue()

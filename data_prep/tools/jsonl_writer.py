"""Writes conversations as `messages` rows, the JSON-lines format that `data_prep.sources.messages` reads.

Images and videos that are files stay in place; generated and embedded images are written once, named by content, to a folder
beside the rows.
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
from sage.inputs.media import open_image
from sage.inputs.video import TIME_KEYS
from sage.io.files import writing


class MediaFolder:
    """The folder of the images of a row file: those of `rows.jsonl` are in `rows_media/`."""

    def __init__(self, row_file: Path) -> None:
        self.folder = row_file.parent / f"{row_file.stem}_media"

    def store_image(self, value: Any) -> str:
        """Stores an image unless it is a file; returns its path: absolute, or relative to the row file if stored here."""
        if isinstance(value, (str, Path)) and not str(value).startswith("data:"):
            return str(Path(value).absolute())
        data = value if isinstance(value, bytes) else _png(value)
        return self._write(data, ".bin" if isinstance(value, bytes) else ".png")

    def store_video(self, value: Any) -> Any:
        """Stores the frames of a video unless they are files; returns the path of its folder or file, or of its frames."""
        if isinstance(value, (list, tuple)):
            return [self.store_image(frame) for frame in value]
        return self.store_image(value)

    def _write(self, data: bytes, suffix: str) -> str:
        name = hashlib.sha256(data).hexdigest()[:32] + suffix
        path = self.folder / name
        if not path.exists():
            with writing(path) as temporary:
                temporary.write_bytes(data)
        return os.path.join(self.folder.name, name)


def messages_as_json(messages: list[Message], media: MediaFolder) -> list[dict[str, Any]]:
    """Stores every image and returns the messages with their paths."""
    return [{"role": m["role"], "content": [_part_as_json(part, media) for part in m["content"]]} for m in messages]


def as_line(conversation: Conversation, media: MediaFolder, **extra: Any) -> str:
    """Returns one line of the file, without its end; `extra` are further fields of the row."""
    row = {"id": conversation.id, "source": conversation.source, "family": conversation.family}
    return json.dumps({**row, "messages": messages_as_json(conversation.messages, media), **extra}, ensure_ascii=False)


def _part_as_json(part: Part, media: MediaFolder) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    path = media.store_image(part["image"]) if part["type"] == "image" else media.store_video(part["video"])
    return {"type": part["type"], part["type"]: path, **{key: part[key] for key in TIME_KEYS if key in part}}


def _png(image: Any) -> bytes:
    stream = io.BytesIO()
    rgb = image if isinstance(image, Image.Image) and image.mode == "RGB" else open_image(image)
    rgb.save(stream, "PNG")
    return stream.getvalue()

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

from data_prep.conversation import Conversation, Part
from sage.inputs.media import open_image
from sage.inputs.video import TIME_KEYS
from sage.io.files import writing


class MediaFolder:
    """The folder of the images of a row file: those of `rows.jsonl` are in `rows_media/`."""

    def __init__(self, row_file: Path) -> None:
        self.folder = row_file.parent / f"{row_file.stem}_media"

    def store(self, value: Any) -> Any:
        """Stores an image, or the frames of a video, unless they are files.

        Returns the path (of a list of frames: their paths), absolute, or relative to the row file if stored here.
        """
        if isinstance(value, (list, tuple)):
            return [self.store(frame) for frame in value]
        if isinstance(value, (str, Path)) and not str(value).startswith("data:"):
            return str(Path(value).absolute())
        data = value if isinstance(value, bytes) else _png(value)
        name = hashlib.sha256(data).hexdigest()[:32] + (".bin" if isinstance(value, bytes) else ".png")
        path = self.folder / name
        if not path.exists():
            with writing(path) as temporary:
                temporary.write_bytes(data)
        return os.path.join(self.folder.name, name)


def as_line(conversation: Conversation, media: MediaFolder, **extra: Any) -> str:
    """Stores every image; returns one line of the file, without its end. `extra` are further fields of the row."""
    messages = [
        {"role": message["role"], "content": [_part_as_json(part, media) for part in message["content"]]}
        for message in conversation.messages
    ]
    row = {"id": conversation.id, "source": conversation.source, "family": conversation.family, "messages": messages}
    return json.dumps(row | extra, ensure_ascii=False)


def _part_as_json(part: Part, media: MediaFolder) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    kind = part["type"]
    return {"type": kind, kind: media.store(part[kind]), **{key: part[key] for key in TIME_KEYS if key in part}}


def _png(image: Any) -> bytes:
    stream = io.BytesIO()
    rgb = image if isinstance(image, Image.Image) and image.mode == "RGB" else open_image(image)
    rgb.save(stream, "PNG")
    return stream.getvalue()

"""Converts messages with images to chat completion requests, and chat completions to `TargetAnswer`s.

The server receives the pixels that training uses. An image file that every reader decodes in the same way is sent unchanged.
Any other image (rotated by EXIF, transparent, 16 bits, animated) is converted to RGB and sent as PNG.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from data_prep.config import DataConfig, Images
from data_prep.conversation import Message, Part, media_parts
from data_prep.dialog import Outcome, TargetAnswer
from data_prep.splits import Split
from sage.inputs.media import LIMIT_KEYS, open_image, open_image_part
from sage.inputs.messages import text_of
from sage.inputs.processing import Processor

PLAIN_FORMATS = ("JPEG", "PNG", "WEBP")
PLAIN_MODES = ("RGB", "L")
ORIENTATION = 0x0112  # EXIF tag; 1 = upright


class OutsideMedia(PermissionError):
    """An image outside the folders whose images may be sent."""


@dataclass(frozen=True)
class MediaPolicy:
    """Selects the image files that may be sent, and how they are sent.

    Attributes:
        roots: resolved folders. An image file outside all of them is never read or sent.
    """

    roots: tuple[Path, ...]
    images: Images

    @classmethod
    def of(cls, config: DataConfig, split: Split, images: Images) -> MediaPolicy:
        """Returns the policy of a split: the `media_root` of each source, by default the folder of its file."""
        roots = []
        for source in config.resolved(split).values():
            path = Path(source.path)
            folder = path if path.is_dir() else path.parent
            roots += [Path(source.media_root or folder).resolve()] if source.media_root or source.path else []
        return cls(tuple(roots), images)

    def url(self, image: Any) -> str:
        """Returns the URL of an image for a request.

        Raises:
            OutsideMedia: the file is outside `roots` after symbolic links are resolved.
            ValueError: the image cannot be read.
        """
        if isinstance(image, Image.Image):
            return _data_url(_png(image), "PNG")
        if not isinstance(image, (str, Path)) or str(image).startswith("data:"):
            try:
                data = image if isinstance(image, bytes) else base64.b64decode(str(image).partition(",")[2], validate=True)
            except ValueError as error:
                raise ValueError("image data: not valid base64") from error
            kind = _plain_format(io.BytesIO(data))
            return _data_url(data if kind else _png(data), kind or "PNG")
        file = Path(image).resolve()
        if not any(file.is_relative_to(root) for root in self.roots):
            raise OutsideMedia(
                f"image {image}: outside data.media_root, so it is not sent to a server; set data.media_root to a folder "
                "above all images, or answer without regenerate.server"
            )
        kind = _plain_format(file)
        if kind and self.images is Images.path:
            return file.as_uri()
        return _data_url(file.read_bytes() if kind else _png(file), kind or "PNG")


def request_messages(messages: list[Message], policy: MediaPolicy) -> list[dict[str, Any]]:
    """Returns the messages in the format of the API: messages with images as lists of parts, other messages as text.

    Raises as `MediaPolicy.url`, and ValueError for a video.
    """
    found = []
    for message in messages:
        has_media = any(True for _ in media_parts([message]))
        content = [_part(part, policy) for part in message["content"]] if has_media else text_of(message)
        found.append({"role": message["role"], "content": content})
    return found


def answer_of(reply: Any, processor: Processor) -> TargetAnswer | None:
    """Returns the answer in a chat completion; None if `reply` is not a chat completion.

    If the server returns token ids (vLLM's `return_token_ids`), they determine the text and the end of the answer, as in
    `sage.generate`.
    """
    try:
        choice = reply["choices"][0]
        message, reason, ids = choice["message"], choice["finish_reason"], choice.get("token_ids")
        text, thoughts = message["content"] or "", message.get("reasoning_content") or message.get("reasoning")
    except (LookupError, TypeError):
        return None
    if thoughts:
        text = f"<think>\n{thoughts.strip()}\n</think>\n\n{text}"
    own_ids: tuple[int, ...] = ()
    if ids:
        text, own_ids = processor.answer_of(ids)
    if reason == "stop" or (ids and ids[-1] in (*processor.end_token_ids, processor.tokenizer.eos_token_id)):
        return TargetAnswer(text, token_ids=own_ids)
    if reason == "length":
        return TargetAnswer(text, Outcome.cut)
    return TargetAnswer(text, Outcome.refused, f"refused by the server: finish_reason {reason}")


def _part(part: Part, policy: MediaPolicy) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part["type"] == "video":
        raise ValueError("a video; servers sample frames in their own way, so it is answered only without regenerate.server")
    url = policy.url(part["image"])
    if any(part.get(key) for key in LIMIT_KEYS):  # the pixels that training uses
        url = _data_url(_png(open_image_part(part)), "PNG")
    return {"type": "image_url", "image_url": {"url": url}}


def _plain_format(source: Any) -> str:
    """Returns the format of an image file that every reader decodes in the same way; empty for any other file."""
    try:
        with Image.open(source) as image:
            is_upright = image.getexif().get(ORIENTATION, 1) == 1
            is_plain = image.mode in PLAIN_MODES and is_upright and getattr(image, "n_frames", 1) == 1
            is_plain = is_plain and not image.has_transparency_data
            return str(image.format) if is_plain and image.format in PLAIN_FORMATS else ""
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError):
        return ""


def _data_url(data: bytes, kind: str) -> str:
    return f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"


def _png(image: Any) -> bytes:
    stream = io.BytesIO()
    open_image(image).save(stream, "PNG")
    return stream.getvalue()

"""Chat logs in the format of Hugging Face and OpenAI: one {"messages": [{"role", "content"}, ...]} per line.

`content` is text or a list of parts: {"type": "text"}, {"type": "image", "image" | "url" | "path" | "base64": ...},
{"type": "image_url", "image_url": {"url": ...}}, {"type": "video", "video": folder | file | [frames]}. A part
without a file, and an <image> or <video> placeholder in a user's text, takes the next entry of the row's "images" or "videos".
"""

from __future__ import annotations

from functools import partial
from typing import Any

from data_prep.conversation import MEDIA, MEDIA_KEYS, Message, Part, Row
from data_prep.sources import SourceConfig
from data_prep.sources.base import Source
from data_prep.sources.llava_json import Roots, check_all_placed, media_list, media_roots, place_media, turns_of
from data_prep.sources.rows import JsonRows, RowSource, require_path
from data_prep.splits import Split
from sage.inputs.video import TIME_KEYS

URL_TYPES = {"image_url": "image", "video_url": "video"}


def chat_messages(row: Row, media_root: Roots) -> list[Message]:
    """Returns the row's messages; relative image and video paths start from `media_root`."""
    messages = turns_of(row, "messages")
    media = {kind: media_list(row.get(f"{kind}s") or row.get(kind), media_root, kind) for kind in MEDIA}
    found = [_message(message, i, media, media_root) for i, message in enumerate(messages)]
    check_all_placed(media)
    return found


def _message(message: Any, index: int, media: dict[str, list[Any]], media_root: Roots) -> Message:
    if not isinstance(message, dict) or "role" not in message:
        raise ValueError(f"message {index}: not a {{role, content}} object")
    content = message.get("content")
    has_media = any(media.values())
    if isinstance(content, str) and message["role"] == "user" and has_media:
        content = place_media(content, media)
    elif isinstance(content, list):
        content = [_part(part, index, media, media_root) for part in content]
    return {"role": message["role"], "content": content}


def _part(part: Any, index: int, media: dict[str, list[Any]], media_root: Roots) -> Part:
    if not isinstance(part, dict):
        raise ValueError(f"message {index}: a part that is {type(part).__name__}, not an object")
    kind = URL_TYPES.get(part.get("type", ""), part.get("type"))
    if kind not in MEDIA:
        return part
    value = next((part[k] for k in (kind, f"{kind}_url", *MEDIA_KEYS) if part.get(k) is not None), None)
    if isinstance(value, dict):
        value = value.get("url") or value.get("bytes") or value.get("path")
    if value is None:
        if not media[kind]:
            raise ValueError(f"message {index}: {kind} part without {kind}")
        value = media[kind].pop(0)
    elif part.get("base64") is value:
        value = f"data:;base64,{value}"
    elif kind == "video" and isinstance(value, list):
        value = media_list(value, media_root, kind)
    else:
        value = media_list(value, media_root, kind)[0]
    return {"type": kind, kind: value, **{name: part[name] for name in TIME_KEYS if part.get(name) is not None}}


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str) -> Source:
    """Opens one JSON-lines (or JSON array) file."""
    path = require_path(label, config.path, "the .jsonl file with the messages")
    root = media_roots(config, path)
    return RowSource(JsonRows(path, cache_dir), partial(chat_messages, media_root=root), root)

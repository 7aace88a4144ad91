"""LLaVA instruction JSON, the layout of `llava_v1_5_mix665k.json`, and ShareGPT, the same layout without images.

An array (or lines) of {"id": ..., "image": "coco/train2017/000.jpg" (optional, or a list), "video": ... (optional),
"conversations": [{"from": "human", "value": "<image>\\nWhat is this?"}, {"from": "gpt", "value": "..."}]}.
Each <image> or <video> placeholder in a human turn takes the next entry of the row's list.
"""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

from data_prep.conversation import Message, Part, Row
from data_prep.sources import SourceConfig, layout_of
from data_prep.sources.base import Source
from data_prep.sources.rows import JsonRows, RowSource, require_path
from data_prep.splits import Split

SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "assistant"), "assistant"),
    "system": "system",
}
Roots = str | tuple[str, ...]
PLACEHOLDER = re.compile(r"\n?<(image|video)>\n?")


def llava_messages(row: Row, media_root: Roots, is_text: bool = False) -> list[Message]:
    """Returns the turns as messages, with images and videos in place of their placeholders.

    Args:
        is_text: whether the layout has no images, so that a placeholder is plain text (ShareGPT: HTML tags).
    """
    turns = turns_of(row, "conversations")
    media = {kind: media_list(row.get(kind), media_root, kind) for kind in ("image", "video")}
    messages = [_turn(turn, i, None if is_text else media) for i, turn in enumerate(turns)]
    check_all_placed(media)
    return messages


def turns_of(row: Row, key: str) -> list[Any]:
    """Returns the list of turns of a row; raises ValueError, naming the keys and the layout they suggest, if there is none."""
    turns = row.get(key)
    if isinstance(turns, list):
        return turns
    choice = layout_of(row)
    remedy = f"for this layout choose {choice}" if choice else f"write the turns as {key!r}"
    keys = ", ".join(map(repr, row))[:120] or "none"
    raise ValueError(f"no {key!r} list; keys of the row: {keys}; {remedy}")


def place_media(text: str, media: dict[str, list[Any]]) -> list[Part]:
    """Splits text at its <image> and <video> placeholders into parts; takes them from `media`, ValueError if too few."""
    parts: list[Part] = []
    position = 0
    for match in PLACEHOLDER.finditer(text):
        kind = match.group(1)
        if not media[kind]:
            raise ValueError(f"a <{kind}> placeholder without {kind}")
        parts += text_part(text[position : match.start()])
        parts.append({"type": kind, kind: media[kind].pop(0)})
        position = match.end()
    return parts + text_part(text[position:])


def media_list(value: Any, media_root: Roots, kind: str) -> list[Any]:
    """Returns one or several images or videos as a list.

    Relative paths start from `media_root`, of several the first that contains the file; ValueError if none does.
    """
    values = [] if value is None or value == "" else value if isinstance(value, list) else [value]
    return [_rooted(item, media_root, kind) for item in values]


def check_all_placed(media: dict[str, list[Any]]) -> None:
    """Raises ValueError if there are more entries than placeholders."""
    for kind, left in media.items():
        if left:
            raise ValueError(f"{len(left)} {kind}(s) more than placeholders; write <{kind}> in the question")


def text_part(text: str) -> list[Part]:
    """Returns a text part in a list, empty for an empty text."""
    return [{"type": "text", "text": text}] if text else []


def media_roots(config: SourceConfig, path: str) -> Roots:
    """Returns the folders that relative paths start from: `media_root` first, then the folder of the data file."""
    folder = os.path.dirname(path)
    return (config.media_root, folder) if config.media_root else folder


def _rooted(item: Any, media_root: Roots, kind: str) -> Any:
    if not isinstance(item, str) or not item.strip() or item.startswith(("data:", "http://", "https://")):
        return item
    if os.path.isabs(item):
        return item
    roots = (media_root,) if isinstance(media_root, str) else media_root
    paths = [os.path.join(root, item) for root in roots]
    found = next((path for path in paths if os.path.exists(path)), None)
    if found is None:
        tried = " and ".join(map(os.path.abspath, paths))
        raise ValueError(f"{kind} {item}: no such file; tried {tried}; set data.media_root, or give absolute paths")
    return found


def _turn(turn: Any, index: int, media: dict[str, list[Any]] | None) -> Message:
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise ValueError(f"turn {index}: not a {{from, value}} object")
    role = SPEAKERS.get(turn.get("from", ""))
    if role is None:
        raise ValueError(f"turn {index}: from {turn.get('from')!r}; allowed: {', '.join(SPEAKERS)}")
    content = place_media(turn["value"], media) if role == "user" and media else text_part(turn["value"])
    return {"role": role, "content": content}


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str) -> Source:
    """Opens one JSON or JSON-lines file."""
    path = require_path(label, config.path, "the JSON file with the conversations")
    root = media_roots(config, path)
    is_text = config.kind == "sharegpt"
    return RowSource(JsonRows(path, cache_dir), partial(llava_messages, media_root=root, is_text=is_text), (root, is_text))

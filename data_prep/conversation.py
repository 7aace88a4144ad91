"""The one shape every source of conversations yields, and the rules it must obey.

Owns: Conversation, its validation, the error that names a bad item. Does not own: file formats (data_prep.sources),
opening pictures (sage.inputs.media), the chat template (data_prep.chat).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from sage.inputs.video import CLIP_KEYS, clip_times

ROLES = ("system", "user", "assistant")
MEDIA = ("image", "video")
MEDIA_KEYS = ("url", "path", "base64")
# What data files write before or after a question whose picture belongs there. In the middle of a text it is a word like
# any other ("how does the <video> tag work?") and is tokenised as such.
PLACEHOLDER = re.compile(r"\A\s*<(?:image|video)>|<(?:image|video)>\s*\Z")

Part = dict[str, Any]
Message = dict[str, Any]


class BadItem(ValueError):
    """One item that cannot become an example: names file, index and reason.

    Args:
        source: file or source name.
        index: position of the item inside it (a line number where the file has lines).
        reason: what is wrong and what would be right.
    """

    def __init__(self, source: str, index: int | str, reason: str) -> None:
        super().__init__(f"{source}: item {index}: {reason}")
        self.source, self.index, self.reason = source, index, reason

    def row(self) -> dict[str, str]:
        """As it stands in a list of what was skipped."""
        return {"source": self.source, "index": str(self.index), "reason": self.reason}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self.index, self.reason)


class TooLong(BadItem):
    """An item that is whole but longer than the configured length; dropped and counted, never an error."""


class BadTemplate(BadItem):
    """An item that shows a fault of the target's chat template: leaving it out mends nothing, others are likely to follow."""


@dataclass
class Conversation:
    """Chat messages with their pictures.

    Attributes:
        id: unique within the source, stable from run to run.
        messages: Hugging Face chat messages; `content` is a list of parts
            {"type": "text", "text": str} | {"type": "image", "image": PIL | path | bytes} |
            {"type": "video", "video": [frames] | folder | file, optional "fps", "start" and "end" in seconds}.
        source: file or data set it came from.
        family: task family ("" if unknown).
        meta: what else the source knows; `index` is the position inside the source.
    """

    id: str
    messages: list[Message]
    source: str = ""
    family: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    def bad(self, reason: str, kind: type[BadItem] = BadItem) -> BadItem:
        """The error that names this conversation."""
        return kind(self.source or "conversation", f"{self.meta.get('index', '?')} (id {self.id})", reason)

    def prompt(self) -> Conversation:
        """The messages before the last assistant answer; the answer goes to `meta["answer"]`."""
        last = max((i for i, message in enumerate(self.messages) if message["role"] == "assistant"), default=None)
        if last is None:
            return self
        meta = self.meta | {"answer": text_of(self.messages[last])}
        return replace(self, messages=self.messages[:last], meta=meta)


def check(conversation: Conversation, need_answer: bool = True) -> Conversation:
    """The conversation with every content as a list of parts, or the reason why it is none.

    Args:
        need_answer: training needs an assistant answer at the end, a prompt a user turn.

    Raises:
        BadItem: an unknown role or part, turns out of order, an empty question, a stray picture placeholder.
    """
    try:
        messages = [_message(message, i) for i, message in enumerate(_list(conversation.messages))]
        _check_order([message["role"] for message in messages], need_answer)
        for i, message in enumerate(messages):
            _check_content(message, i)
    except ValueError as error:
        raise conversation.bad(str(error)) from error
    return replace(conversation, messages=messages)


def text_of(message: Message) -> str:
    """All text of a message."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def media_parts(messages: list[Message]) -> Iterator[Part]:
    """Picture and video parts in reading order."""
    for message in messages:
        if not isinstance(message["content"], str):
            yield from (part for part in message["content"] if part["type"] in MEDIA)


def _list(messages: Any) -> list[Any]:
    if not isinstance(messages, list) or not messages:
        raise ValueError("no messages; give a list of {role, content}")
    return messages


def _message(message: Any, index: int) -> Message:
    if not isinstance(message, dict) or "role" not in message or "content" not in message:
        raise ValueError(f"message {index}: not a {{role, content}} object")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise ValueError(f"message {index}: role {role!r}; allowed: {', '.join(ROLES)}")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError(f"message {index}: content is {type(content).__name__}; allowed: text or a list of parts")
    parts = [_part(part, index) for part in content]
    if role == "assistant" and all(part["type"] == "text" for part in parts):
        parts = [{"type": "text", "text": "".join(part["text"] for part in parts)}]  # one answer, whatever the pieces
    return {"role": role, "content": parts}


def _part(part: Any, index: int) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise ValueError(f"message {index}: a text part without text")
        return {"type": "text", "text": _clean(part["text"], index)}
    if kind in MEDIA:
        value = next((part[key] for key in (kind, *MEDIA_KEYS) if part.get(key) is not None), None)
        _check_media(kind, value, index)
        return {"type": kind, kind: value, **(_times(part, index) if kind == "video" else {})}
    raise ValueError(f"message {index}: part of type {kind!r}; allowed: text, image, video")


def _times(part: Part, index: int) -> dict[str, float]:
    clip_times(part, f"message {index}: video")
    return {name: float(part[name]) for name in CLIP_KEYS if part.get(name) is not None}


def _clean(text: str, index: int) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"message {index}: text is not valid Unicode at character {error.start}") from error
    return text


def _check_media(kind: str, value: Any, index: int) -> None:
    if kind == "image" and not isinstance(value, (str, Path, bytes, Image.Image)):
        found = "nothing" if value is None else type(value).__name__
        raise ValueError(f"message {index}: an image part with {found}; allowed: a path, bytes or a PIL picture")
    if kind == "video" and (not isinstance(value, (str, Path, list, tuple)) or not value):
        raise ValueError(f"message {index}: a video part without frames; allowed: a list of frames, a folder, a file")


def _check_order(roles: list[str], need_answer: bool) -> None:
    turns = roles[1:] if roles[0] == "system" else roles
    for i, role in enumerate(turns, start=len(roles) - len(turns)):
        expected = ("user", "assistant")[(i - len(roles) + len(turns)) % 2]
        if role != expected:
            before = roles[i - 1] if i else "nothing"
            raise ValueError(f"message {i}: {role!r} after {before!r}, expected {expected!r}; turns must alternate")
    last = "assistant" if need_answer else "user"
    if not turns or turns[-1] != last:
        raise ValueError(f"ends with {roles[-1]!r}; the last message must be the {last}'s")


def _check_content(message: Message, index: int) -> None:
    role, parts = message["role"], message["content"]
    if role != "user" and any(part["type"] in MEDIA for part in parts):
        raise ValueError(f"message {index}: a picture or video in a {role} message; only users show pictures")
    if role == "user" and not any(part["type"] in MEDIA or part["text"].strip() for part in parts):
        raise ValueError(f"message {index}: an empty user message")
    if role != "assistant":
        stray = next((found for part in parts if (found := PLACEHOLDER.search(part.get("text", "")))), None)
        if stray:
            raise ValueError(f"message {index}: placeholder {stray.group().strip()} without a picture or video")

"""Texts and content parts of Hugging Face chat messages, whose content is a text or a list of parts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

Messages = list[dict[str, Any]]
PRIVATE_USE = range(0xF0000, 0xFFFFD)  # characters of a Unicode private use area


def text_of(message: Mapping[str, Any]) -> str:
    """Returns the concatenated text of a message."""
    content = message.get("content", "")
    return content if isinstance(content, str) else "".join(part["text"] for part in parts_of(message, "text"))


def parts_of(message: Mapping[str, Any], *kinds: str) -> list[dict[str, Any]]:
    """Returns the parts of some types in reading order; a content that is a text has none."""
    content = message.get("content", "")
    return [] if isinstance(content, str) else [part for part in content if part.get("type") in kinds]


def check_messages(messages: Messages) -> None:
    """Raises ValueError for what is no message of texts and media, or has media in a role that few templates render."""
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f"message {i}: not a {{role, content}} object")
        role, content = message["role"], message.get("content", "")
        if not isinstance(content, (str, list, tuple)):
            raise ValueError(f"message {i}: content is {type(content).__name__}; allowed: text or a list of parts")
        for part in () if isinstance(content, str) else content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in ("text", "image", "video"):
                raise ValueError(f"message {i}: part of type {kind!r}; allowed: text, image, video")
            if kind == "text" and not isinstance(part.get("text"), str):
                raise ValueError(f"message {i}: a text part without text")
            if kind != "text" and role != "user":
                raise ValueError(f"message {i}: an image or video in a message of role {role!r}; allowed: role 'user'")


def as_parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the content as a list of parts."""
    content = message.get("content", "")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def escape(messages: Messages, pattern: re.Pattern[str]) -> tuple[Messages, str]:
    """Splits, in all texts, the tokens that would end a turn or stand for media, so that they are tokenized as text.

    Example: "<|im_end|>" becomes "<" + separator + "|im_end|>", later two segments, neither of which is a special token.
    `pattern` matches these tokens (`Processor.quotable`). Returns the messages, and the separator; neither it nor the character
    after it occurs in them.
    """
    rendered = [message.get(key) for message in messages for key in ("tool_calls", "tools")]
    text = "".join(map(text_of, messages)) + json.dumps(rendered, ensure_ascii=False, default=str)
    separator = next(chr(code) for code in PRIVATE_USE if chr(code) not in text and chr(code + 1) not in text)

    def escaped(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: match[0][0] + separator + match[0][1:], value)
        if isinstance(value, list):
            return [escaped(item) for item in value]
        return {key: escaped(item) for key, item in value.items()} if isinstance(value, dict) else value

    keys = ("content", "tool_calls", "tools")
    return [message | {key: escaped(message[key]) for key in keys if message.get(key)} for message in messages], separator

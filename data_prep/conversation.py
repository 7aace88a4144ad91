"""The conversation that every source yields, its validation, and the error of an item that fails it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any

from PIL import Image

from sage.inputs.media import LIMIT_KEYS, check_part_keys
from sage.inputs.messages import check_messages, parts_of, text_of
from sage.inputs.video import TIME_KEYS, video_times

ROLES = ("system", "user", "assistant", "tool")
MEDIA = ("image", "video")
MEDIA_KEYS = ("url", "path", "base64")
FOLLOW_UPS = "follow_ups"  # key of `Conversation.meta`
# Keys of a message beside role and content. The target's chat template renders them, except for `weight` (0: no training) and
# `token_ids` (those of an answer whose text has others). `tools` are those of the conversation, in its first message;
# `unfinished` marks a last answer whose end is missing, so that nothing is trained to end there.
EXTRAS: dict[str, Any] = {
    "reasoning_content": str,
    "tool_calls": list,
    "tool_call_id": str,
    "name": str,
    "weight": Real,
    "token_ids": list,
    "tools": list,
    "unfinished": bool,
}
OF_ANSWERS = ("reasoning_content", "tool_calls", "token_ids", "unfinished")
MAX_DEPTH = 100  # of tools and tool calls
FOLLOWED_BY = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}

Part = dict[str, Any]
Message = dict[str, Any]
Row = dict[str, Any]  # of a data file, before it becomes messages


def printable(text: str) -> str:
    """Returns a text that can be written as UTF-8: with escapes in place of lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


class BadItem(ValueError):
    """An item that cannot become an example: its file, its position there (`item_label`), the fault and what is allowed."""

    kind = "invalid"

    def __init__(self, source: str, index: int | str, reason: str) -> None:
        source, reason = printable(source), printable(reason)
        index = printable(index) if isinstance(index, str) else index
        super().__init__(f"{source}: item {index}: {reason}")
        self.source, self.index, self.reason = source, index, reason

    def as_row(self) -> dict[str, str]:
        return {"source": self.source, "index": str(self.index), "kind": self.kind, "reason": self.reason}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self.index, self.reason)


class TooLong(BadItem):
    """A valid item that exceeds the configured length; it is dropped and counted, and never stops a run."""

    kind = "too long"


class BadSource(BadItem):
    """An item of a source without valid items. Skipping it does not help."""


class BadTemplate(BadSource):
    """An item that reveals a fault of the target's chat template: other items fail likewise."""


@dataclass
class Conversation:
    """Chat messages with their images and videos.

    Attributes:
        id: unique within the source, the same in every run.
        messages: Hugging Face chat messages, with the keys `EXTRAS` at most; `content` is a list of parts
            {"type": "text", "text": str} | {"type": "image", "image": PIL | path | bytes} |
            {"type": "video", "video": [frames] | folder | file, optional "fps", "start" and "end" in seconds}.
        source: file or data set of the item.
        family: task family ("" if unknown).
        meta: further fields of the source; `index` is the position in the source, `answer` the reference answer of a
            prompt, `follow_ups` the later questions of a prompt (`expand_follow_ups`).
    """

    id: str
    messages: list[Message]
    source: str = ""
    family: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    def error(self, reason: str, error_type: type[BadItem] = BadItem) -> BadItem:
        """Returns the error that names this conversation."""
        return error_type(self.source or "conversation", item_label(self.meta.get("index", "?"), self.id), reason)

    def prompt(self) -> Conversation:
        """Returns the messages before the last assistant answer; the answer goes to `meta["answer"]`."""
        last = max((i for i, message in enumerate(self.messages) if message["role"] == "assistant"), default=None)
        if last is None:
            return self
        meta = self.meta | {"answer": text_of(self.messages[last])}
        return replace(self, messages=self.messages[:last], meta=meta)


def item_label(index: int | str, name: object = None) -> str:
    """Returns the label of an item in messages and lists: its index and, where the data has one, its id."""
    return str(index) if name is None or str(name) == str(index) else f"{index} (id {name})"


def check_conversation(conversation: Conversation, needs_answer: bool = True) -> Conversation:
    """Validates a conversation and returns it with every content as a list of parts; BadItem if it is invalid.

    The last message must be an answer (training, `needs_answer`) or a question (a prompt).
    """
    try:
        if not isinstance(conversation.messages, list) or not conversation.messages:
            raise ValueError("no messages; give a list of {role, content}")
        check_messages(conversation.messages)
        messages = [_message(message, i) for i, message in enumerate(conversation.messages)]
        _check_order([message["role"] for message in messages], needs_answer)
        for i, message in enumerate(messages):
            if message["role"] == "user" and not (parts_of(message, *MEDIA) or text_of(message).strip()):
                raise ValueError(f"message {i}: an empty user message")
            if needs_answer and message["role"] == "assistant" and not (text_of(message).strip() or "tool_calls" in message):
                raise ValueError(f"message {i}: an empty answer; a draft learns nothing from it")
            if message.get("unfinished") and message is not messages[-1]:
                raise ValueError(f"message {i}: unfinished, and others follow; end the conversation there")
    except ValueError as error:
        raise conversation.error(str(error)) from error
    return replace(conversation, messages=messages)


def extras_of(message: Message) -> dict[str, Any]:
    """Returns the keys of a message beside role and content."""
    return {key: message[key] for key in EXTRAS if message.get(key) is not None}


def media_parts(messages: list[Message]) -> Iterator[Part]:
    for message in messages:
        yield from parts_of(message, *MEDIA)


def expand_follow_ups(prompts: Iterable[Any], answer: Callable[[list[Message]], str]) -> Iterator[Any]:
    """Yields every prompt, followed by one prompt per follow-up question; prompts that are no conversations pass unchanged.

    `answer` returns the target's answer to messages, when the next prompt is requested.
    """
    for prompt in prompts:
        yield prompt
        questions = prompt.meta.get(FOLLOW_UPS, ()) if isinstance(prompt, Conversation) else ()
        messages = prompt.messages if questions else []
        for number, question in enumerate(questions, start=2):
            reply = {"role": "assistant", "content": [{"type": "text", "text": answer(messages)}]}
            messages = [*messages, reply, {"role": "user", "content": [{"type": "text", "text": question}]}]
            yield replace(prompt, id=f"{prompt.id}-turn-{number}", messages=messages, meta=prompt.meta | {FOLLOW_UPS: []})


def _message(message: Any, index: int) -> Message:
    role, content = message.get("role"), message.get("content", "")
    if role not in ROLES:
        raise ValueError(f"message {index}: role {role!r}; allowed: {', '.join(ROLES)}")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    parts = [_part(part, index) for part in content]
    if role == "assistant" and all(part["type"] == "text" for part in parts):
        parts = [{"type": "text", "text": "".join(part["text"] for part in parts)}]
    return {"role": role, "content": parts, **_checked_extras(message, index)}


def _checked_extras(message: Message, index: int) -> dict[str, Any]:
    extras = extras_of(message)
    for key, value in extras.items():
        if not isinstance(value, EXTRAS[key]):
            raise ValueError(f"message {index}: {key} is {type(value).__name__}; allowed: {EXTRAS[key].__name__}")
        if value and ((key in OF_ANSWERS and message["role"] != "assistant") or (key == "tools" and index)):
            raise ValueError(f"message {index}: {key} in a message of role {message['role']!r}, which has none; remove it")
        if _is_deeper(value, MAX_DEPTH):
            raise ValueError(f"message {index}: {key} is nested more than {MAX_DEPTH} levels deep")
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError(f"message {index}: {key} is not valid ({error})") from error
    if extras.get("weight", 1) not in (0, 1):
        raise ValueError(f"message {index}: weight {extras['weight']}; allowed: 0 (not trained on) or 1")
    return extras


def _is_deeper(value: Any, limit: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(limit == 0 or _is_deeper(item, limit - 1) for item in inner)


def _part(part: Any, index: int) -> Part:
    kind = part["type"]
    if kind == "text":
        try:
            part["text"].encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"message {index}: text is not valid Unicode at character {error.start}") from error
        return {"type": "text", "text": part["text"]}
    value = next((part[key] for key in (kind, *MEDIA_KEYS) if part.get(key) is not None), None)
    if kind == "image" and not isinstance(value, (str, Path, bytes, Image.Image)):
        given = "nothing" if value is None else type(value).__name__
        raise ValueError(f"message {index}: an image part with {given}; allowed: a path, bytes or a PIL image")
    if kind == "video" and (not isinstance(value, (str, Path, list, tuple)) or not value):
        raise ValueError(f"message {index}: a video part without frames; allowed: a list of frames, a folder, a file")
    check_part_keys(part, f"message {index}")
    limits = {name: part[name] for name in LIMIT_KEYS if part.get(name) is not None}
    if kind == "image":
        return {"type": kind, kind: value, **limits}
    video_times(part, f"message {index}: video")
    return {"type": kind, kind: value, **{name: float(part[name]) for name in TIME_KEYS if part.get(name) is not None}}


def _check_order(roles: list[str], needs_answer: bool) -> None:
    start = int(roles[0] == "system")
    allowed: tuple[str, ...] = ("user",)
    for i, role in enumerate(roles[start:], start):
        if role not in allowed:
            before, expected = roles[i - 1] if i else "nothing", " or ".join(map(repr, allowed))
            raise ValueError(f"message {i}: {role!r} after {before!r}, expected {expected}; turns must alternate")
        allowed = FOLLOWED_BY[role]
    if needs_answer and roles[-1] != "assistant":
        raise ValueError(f"ends with {roles[-1]!r}; the last message must be the assistant's")
    if not needs_answer and roles[-1] not in ("user", "tool"):
        raise ValueError(f"ends with {roles[-1]!r}; the last message must be the user's")

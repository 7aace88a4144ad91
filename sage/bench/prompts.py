"""Prompts of the command line: a JSONL file of chat messages, images with a question, or a few texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sage.bench.measurement import BenchPrompt

Messages = list[dict[str, Any]]
MEDIA = ("image", "video")

TEXTS = (
    "Explain in a few sentences how a lighthouse works.",
    "Describe what a busy market street looks like on a rainy morning.",
    "Write a short, friendly note that invites a neighbour to dinner.",
    "What are the steps to change a bicycle tyre? Answer in detail.",
)


def load_prompts(
    target: Any, file: str | None, images: Sequence[str], text: str | None, limit: int | None, family: str | None = None
) -> list[BenchPrompt]:
    """Returns model-ready prompts from the first given source: `file`, then `images` and `text`, then `TEXTS`. Raises
    ValueError with the file and line, or the image, that cannot be used.

    Args:
        file: JSONL; a line is a list of Hugging Face chat messages, or an object with "messages" and, optionally, "id"
            and "family". A final assistant answer is dropped; relative image paths are relative to the file's folder.
        images: paths or URLs; each is a prompt of its own with `text`.
        limit: maximum number of prompts; None for all.
        family: only the prompts of this task family.
    """
    chats = _chats(file, images, text)
    if family is not None:
        known = sorted({own for _, own, _ in chats if own})
        chats = [chat for chat in chats if chat[1] == family]
        if not chats:
            raise ValueError(f"--family {family}: no prompt of this family; families of the file: {', '.join(known) or 'none'}")
    prompts = []
    for name, family, messages in chats[:limit]:
        try:
            inputs = target.prepare(messages)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        prompts.append(BenchPrompt(name=name, inputs=inputs, family=family))
    return prompts


def _chats(file: str | None, images: Sequence[str], text: str | None) -> list[tuple[str, str, Messages]]:
    if file is not None:
        return read_jsonl(Path(file))
    question = {"type": "text", "text": text or "Describe the image in detail."}
    if images:
        return [(Path(image).name, "", _user([{"type": "image", "image": image}, question])) for image in images]
    texts = TEXTS if text is None else (text,)
    return [(f"text-{index}", "", _user([{"type": "text", "text": one}])) for index, one in enumerate(texts)]


def read_jsonl(file: Path) -> list[tuple[str, str, Messages]]:
    """Returns (name, family, messages up to the question) of every line; ValueError for no line or one without messages."""
    if not file.is_file():
        raise ValueError(f"--prompts {file}: no such file; give a JSONL file of chat messages")
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"--prompts {file}: is empty; give one list of chat messages per line")
    return [_line(file, number, line) for number, line in enumerate(lines, start=1)]


def _line(file: Path, number: int, line: str) -> tuple[str, str, Messages]:
    where = f"--prompts {file}, line {number}"
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}); write one object or list per line") from error
    fields = entry if isinstance(entry, dict) else {"messages": entry}
    messages = fields.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError(f'{where}: no chat messages; write [{{"role": "user", "content": [...]}}] or {{"messages": [...]}}')
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError(f"{where}: has no question; end with a user message")
    resolved = [_resolved(message, file.parent) for message in messages]
    return str(fields.get("id", f"{file.stem}-{number}")), str(fields.get("family", "")), resolved


def _resolved(message: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the message with relative paths of images and frames resolved against `folder`."""
    if not isinstance(message.get("content"), list):
        return message
    parts = [
        part | {kind: _below(part[kind], folder) for kind in MEDIA if kind in part} if isinstance(part, dict) else part
        for part in message["content"]
    ]
    return message | {"content": parts}


def _below(source: Any, folder: Path) -> Any:
    if isinstance(source, list):
        return [_below(frame, folder) for frame in source]
    is_path = isinstance(source, str) and not source.startswith(("http://", "https://", "data:", "file:"))
    return str(folder / source) if is_path else source


def _user(content: list[dict[str, Any]]) -> Messages:
    return [{"role": "user", "content": content}]

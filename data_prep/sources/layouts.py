"""Rows of data files -> messages. The layout of a row is recognized by its keys.

    messages, conversations, conversation, texts     a list of turns: {role, content}, {from, value} or {user, assistant}
    question, answer (prompt, response; ..)          columns of text
    body.messages                                    a request of OpenAI's batches

Columns of other names are mapped by role: `columns: {question: q, answer: a, image: img}`; `ROLES` are the roles. Images and
videos are content parts, or the row's `image`, `images`, `video`, `videos`. The latter take the places of <image> and <video>
in questions, or of parts that name no file; without any, they come before the first question, as in LLaVA. In a row without
images the same characters are text, such as tags of HTML.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from data_prep.conversation import MEDIA, MEDIA_KEYS, Message, Part, Row, extras_of
from sage.inputs.media import FILE_URL, LIMIT_KEYS, check_part_keys
from sage.inputs.messages import text_of
from sage.inputs.video import TIME_KEYS, VIDEO_SUFFIXES

ROLES = ("id", "family", "system", "question", "answer", "image", "images", "video", "messages")
TURN_COLUMNS = ("messages", "conversations", "conversation", "texts")
ALIASES = {
    "question": ("question", "prompt", "query", "instruction"),
    "answer": ("answer", "response", "completion", "output"),
    "system": ("system", "system_prompt"),
}
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "assistant"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    "tool": "tool",
}
MEDIA_SUFFIXES = (*VIDEO_SUFFIXES, ".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
URL_TYPES = {"image_url": "image", "video_url": "video"}
RENAMED = dict.fromkeys(("reasoning", "thinking", "thought", "thoughts"), "reasoning_content")
RENAMED |= dict.fromkeys(("loss", "train"), "weight")
# which others render or mask by, and this project does not
REFUSED = ("function_call", "functions", "audio", "refusal", "documents", "chat_template_kwargs", "train_detail")
Roots = str | tuple[str, ...]
Media = dict[str, dict[int, Any]]  # "image" and "video" -> those of the row that are left, by their number


def table_messages(row: Row, columns: dict[str, str], media_root: Roots) -> list[Message]:
    """Returns a row's messages; relative image and video paths start from `media_root`.

    ValueError, TypeError or KeyError: not a known layout, different numbers of placeholders and files, a missing file, or a key
    that would change the text if it was rendered.
    """
    if isinstance(row.get("body"), dict):
        row = row | row["body"]
    _refuse_keys(row)
    files = {kind: [_rooted(item, media_root, kind) for item in _media_column(row, columns, kind)] for kind in MEDIA}
    media = {kind: dict(enumerate(values)) for kind, values in files.items()}
    messages = [message for i, turn in enumerate(_turns(row, columns)) for message in _messages(turn, i)]
    if not any(files.values()) and not any(isinstance(message["content"], list) for message in messages):
        _refuse_unread_media(row)
    for i, message in enumerate(messages):
        if isinstance(message["content"], list):
            message["content"] = [_part(part, i, media, media_root) for part in message["content"]]
    _place_media(messages, media)
    for message in messages:
        if isinstance(message["content"], str):
            message["content"] = text_part(message["content"])
    if system := _column(row, columns, "system"):
        if any(message["role"] == "system" for message in messages):
            raise ValueError("system: beside a message of that role; keep one of them")
        messages.insert(0, {"role": "system", "content": text_part(_text(system, "system"))})
    given = [row.get("tools"), *(message.pop("tools", None) for message in messages)]
    tools = [value for value in map(_parsed, given) if value]
    if any(value != tools[0] for value in tools):
        raise ValueError("tools: different ones in one row; keep those beside the messages")
    if messages and tools:
        messages[0]["tools"] = tools[0]
    return messages


def described(row: Any, columns: dict[str, str]) -> str:
    if not isinstance(row, dict):
        return "no objects"
    row = row | row["body"] if isinstance(row.get("body"), dict) else row
    name = _turn_column(row, columns)
    turns = _parsed(row.get(name)) if name else None
    if isinstance(turns, list) and turns and isinstance(turns[0], dict):
        layout = f"turns of {{{', '.join(list(turns[0])[:2])}}} in {name!r}"
    else:
        layout = "columns " + ", ".join(repr(key) for role in ("question", "answer") if (key := _name(row, columns, role)))
    media = [key for kind in MEDIA for key in (kind, f"{kind}s") if row.get(columns.get(key, key))]
    return layout + (f", media in {', '.join(map(repr, media))}" if media else "")


# -- turns -------------------------------------------------------------------------------------------------------------------


def _turns(row: Row, columns: dict[str, str]) -> list[Any]:
    """Returns the turns of a row; those of columns are made of question and answer."""
    name = _turn_column(row, columns)
    if name is not None:
        if not isinstance(turns := _parsed(row[name]), list):
            raise ValueError(f"{name!r} is {type(turns).__name__}, not a list of turns")
        return turns
    question = _name(row, columns, "question")
    if question not in row:
        keys = ", ".join(map(str, row))[:120] or "none"
        wanted, remedy = columns.get("question", "messages"), "set data.sources.NAME.columns.question"
        raise ValueError(f"no column {wanted!r}; keys of the row: {keys}; write the turns as 'messages', or {remedy}")
    answer = _column(row, columns, "answer")
    if isinstance(row[question], list) and isinstance(answer, list):
        return row[question] + answer
    answer = answer[0] if isinstance(answer, list) and answer else answer
    reply = {"role": "assistant", "content": _text(answer, "the answer"), "reasoning_content": row.get("reasoning_content")}
    turns = [] if answer is None or answer == [] else [reply]
    if isinstance(row[question], list):
        return row[question] + turns
    extra = f"\n{_text(row['input'], 'input')}" if question == "instruction" and row.get("input") else ""
    return [{"role": "user", "content": _text(row[question], question) + extra}, *turns]


def _text(value: Any, name: str) -> str:
    """Returns a text or number of a column as text."""
    if isinstance(value, (dict, list)) and value:
        raise ValueError(f"{name} is {type(value).__name__}, not text; write the turns as 'messages'")
    return str(value)


def _turn_column(row: Row, columns: dict[str, str]) -> str | None:
    if "question" in columns:
        return None
    return columns.get("messages") or next((name for name in TURN_COLUMNS if row.get(name) is not None), None)


def _messages(turn: Any, index: int) -> list[Message]:
    """Returns the messages of a turn: one, or a question and its answer."""
    turn = {RENAMED.get(key, key): value for key, value in turn.items() if value is not None} if isinstance(turn, dict) else {}
    _refuse_keys(turn)
    if "user" in turn and "assistant" in turn:
        return [{"role": role, "content": turn[role]} for role in ("user", "assistant")]
    speaker, content = ("from", "value") if "from" in turn else ("role", "content")
    if speaker not in turn or not (content in turn or "tool_calls" in turn):
        raise ValueError(f"message {index}: not a {{role, content}}, {{from, value}} or {{user, assistant}} object")
    if (role := SPEAKERS.get(str(turn[speaker]))) is None:
        raise ValueError(f"message {index}: {speaker} {turn[speaker]!r}; allowed: {', '.join(SPEAKERS)}")
    extra = extras_of(turn)
    calls = _parsed(extra.get("tool_calls", ()))
    functions: list[Any] = [call.get("function", call) if isinstance(call, dict) else None for call in calls]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise ValueError(f"message {index}: tool_calls without a function's name")
    if "tool_calls" in extra:  # with the arguments as an object, which chat templates expect
        functions = [function | {"arguments": _parsed(function.get("arguments")) or {}} for function in functions]
        extra["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return [{"role": role, "content": turn.get(content, ""), **extra}]


def _parsed(value: Any) -> Any:
    """Returns the content of a JSON text; any other value, and a text that is no JSON, unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _refuse_keys(row: Row) -> None:
    for key in REFUSED:
        if row.get(key):
            raise ValueError(f"{key}: not supported, and the text differs without it; remove the key, or the row")


# -- columns -----------------------------------------------------------------------------------------------------------------


def _name(row: Row, columns: dict[str, str], role: str) -> str | None:
    """Returns the column of a role: the mapped one, else the first of its usual names that the row has."""
    return columns.get(role) or next((name for name in ALIASES[role] if row.get(name) is not None), None)


def _column(row: Row, columns: dict[str, str], role: str) -> Any:
    name = _name(row, columns, role)
    if name is not None and name not in row:
        keys = ", ".join(map(str, row))[:120]
        raise ValueError(f"no column {name!r}; keys of the row: {keys}; set data.sources.NAME.columns.{role}")
    return None if name is None else row[name]


def _media_column(row: Row, columns: dict[str, str], kind: str) -> list[Any]:
    names = [columns[role] for role in (kind, f"{kind}s") if role in columns]
    names = names or [role for role in (kind, f"{kind}s") if row.get(role) is not None]
    values = [value for name in names for value in (row[name] if isinstance(row[name], list) else [row[name]])]
    contents = (value.get("bytes") or value.get("path") if isinstance(value, dict) else value for value in values)
    return [content for content in contents if content is not None and content != ""]


def _refuse_unread_media(row: Row) -> None:
    """Raises ValueError for an image or video in a column of another name, without which the row would be another one."""
    for name, value in row.items():
        first = value[0] if isinstance(value, list) and value else value
        is_file = isinstance(first, str) and first.lower().endswith(MEDIA_SUFFIXES) and not re.search(r"\s|://", first)
        if name != "id" and (is_file or (isinstance(first, dict) and first.get("bytes") is not None)):
            raise ValueError(f"{name}: has images or videos, and is not read; set data.sources.NAME.columns.image={name}")


# -- images and videos -------------------------------------------------------------------------------------------------------


def _part(part: Any, index: int, media: Media, media_root: Roots) -> Part:
    if not isinstance(part, dict):
        raise ValueError(f"message {index}: a part that is {type(part).__name__}, not an object")
    kind = part.get("type")
    kind = URL_TYPES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in MEDIA:
        return part
    value = next((part[k] for k in (kind, f"{kind}_url", *MEDIA_KEYS) if part.get(k) is not None), None)
    if isinstance(value, dict):
        part, value = value | part, value.get("url") or value.get("bytes") or value.get("path")
    check_part_keys(part, f"message {index}: {kind}")
    if value is None:
        number = next(iter(media[kind]), None) if part.get("index") is None else part["index"]
        if number not in media[kind]:
            raise ValueError(f"message {index}: {kind} part without {kind}")
        value = media[kind].pop(number)
    elif part.get("base64") is value:
        value = f"data:;base64,{value}"
    else:
        values = [_rooted(item, media_root, kind) for item in (value if isinstance(value, list) else [value])]
        value = values if kind == "video" and isinstance(value, list) else values[0]
    return {"type": kind, kind: value, **{name: part[name] for name in (*TIME_KEYS, *LIMIT_KEYS) if part.get(name) is not None}}


def _place_media(messages: list[Message], media: Media) -> None:
    """Puts the row's images and videos into its questions; ValueError unless there is one place for each."""
    questions = [message for message in messages if message["role"] == "user" and isinstance(message["content"], str)]
    texts = [message["content"] for message in questions]
    spans: list[list[tuple[int, int, str]]] = [[] for _ in texts]  # of placeholders, by question
    leading: list[Part] = []
    for kind, values in media.items():
        matches = _placeholders(texts, kind, len(values))
        if not values or any(matches):
            for of_question, of_text in zip(spans, matches, strict=True):
                of_question += [(*span, kind) for span in of_text]
        elif questions:
            at_border = re.compile(rf"\A\s*<{kind}>|<{kind}>\s*\Z")
            for other in (message for message in messages if message not in questions and at_border.search(text_of(message))):
                raise ValueError(f"a placeholder <{kind}> in a message of role {other['role']!r}; allowed: role 'user'")
            leading += [{"type": kind, kind: values.pop(number)} for number in list(values)]
    for message, text, placeholders in zip(questions, texts, spans, strict=True):
        if placeholders or leading:
            message["content"] = [*leading, *_split_text(text, sorted(placeholders), media)]
            leading = []
    for kind, left in media.items():
        if left:
            raise ValueError(f"{len(left)} {kind}(s) more than placeholders; write <{kind}> in the question")


def _placeholders(texts: list[str], kind: str, number: int) -> list[list[tuple[int, int]]]:
    """Returns the spans of the placeholders of `number` images or videos in each text.

    Where <image> occurs more often, those at the beginning or end of a line count, or else of a text. ValueError if there are
    others than `number`, or none are left for a placeholder that has a place of its own.
    """
    token = f"<{kind}>"
    if not number:
        lost = rf"\A\s*{token}(?=\s*\n|\s*\Z|\S)|(?:\n|[?.!])\s*{token}\s*\Z"
        if any(re.search(lost, text) and f"</{kind}>" not in text for text in texts):
            raise ValueError(f"placeholder {token} without an image or video")
        return [[] for _ in texts]
    counts = []
    for pattern in (token, rf"(?m)^(?:[ \t]*{token})+|(?:{token}[ \t]*)+$", rf"\A(?:\s*{token})+|(?:{token}\s*)+\Z"):
        runs = [[(text, *run.span()) for run in re.finditer(pattern, text)] for text in texts]
        spans = [[match.span() for run in of_text for match in re.compile(token).finditer(*run)] for of_text in runs]
        counts.append(sum(map(len, spans)))
        if counts[-1] in (0, number):
            return spans
    if counts[0] < number:
        raise ValueError(f"{number - counts[0]} {kind}(s) more than placeholders; write {token} in the question")
    raise ValueError(f"a {token} placeholder without {kind}: {counts[0]} of them and {number} {kind}(s)")


def _split_text(text: str, placeholders: list[tuple[int, int, str]], media: Media) -> list[Part]:
    """Returns the parts of a text with media in place of placeholders and of the line breaks beside them."""
    parts: list[Part] = []
    position = 0
    for start, end, kind in placeholders:
        parts += text_part(text[position:start].removesuffix("\n"))
        parts.append({"type": kind, kind: media[kind].pop(next(iter(media[kind])))})
        position = end + text[end:].startswith("\n")
    return parts + text_part(text[position:])


def text_part(text: str) -> list[Part]:
    return [{"type": "text", "text": text}] if text else []


def _rooted(item: Any, media_root: Roots, kind: str) -> Any:
    """Returns an image or video, a relative path from the first of `media_root` that contains it; ValueError if none does."""
    item = item.removeprefix(FILE_URL) if isinstance(item, str) else item
    is_path = isinstance(item, str) and item.strip() and not item.startswith(("data:", "http://", "https://"))
    if not is_path or os.path.isabs(item):
        return item
    roots = (media_root,) if isinstance(media_root, str) else media_root
    paths = [os.path.join(root, item) for root in roots]
    for path in paths:
        if os.path.exists(path):
            return path
    tried = " and ".join(map(os.path.abspath, paths))
    raise ValueError(f"{kind} {item}: no such file; tried {tried}; set data.media_root, or give absolute paths")

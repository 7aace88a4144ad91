"""Messages to users: tests name the key and the remedy; the complete wording is kept in one snapshot, messages.json.

`python -m pytest --update-messages` rewrites the snapshot; review its diff like any other change of wording.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from huggingface_hub.constants import HF_HOME

SNAPSHOT = Path(__file__).with_name("messages.json")
UPDATE = "--update-messages"
_seen: dict[str, int] = {}
_recorded: dict[str, str] = {}
_is_updating = False


@contextmanager
def refused(*parts: str, error: type[BaseException] = ValueError) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expects `error`, raised with a message that contains every one of `parts`: the key, the value, the remedy."""
    with pytest.raises(error) as caught:
        yield caught
    check_message(str(caught.value), *parts)


def exit_code(main: Callable[[], object], *words: object) -> int:
    """Returns the exit code of a console entry point."""
    with mock.patch.object(sys, "argv", ["command", *map(str, words)]), pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def check_message(text: str, *parts: str) -> None:
    """Asserts that `text` contains `parts`, and that its wording is that of the snapshot."""
    for part in parts:
        assert part in text, f"{part!r} is not in the message: {text}"
    test = os.environ["PYTEST_CURRENT_TEST"].rsplit(" ", 1)[0]
    number = _seen[test] = _seen.get(test, 0) + 1
    name, wording = f"{test} {number}", _normalized(text)
    if _is_updating:
        _recorded[name] = wording
    elif SNAPSHOT.exists():
        assert wording == _snapshot().get(name), f"the wording has changed; review it and run pytest {UPDATE}"


@cache
def _snapshot() -> dict[str, str]:
    snapshot: dict[str, str] = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    return snapshot


def _normalized(text: str) -> str:
    """Without what differs from run to run and between machines: temporary folders, the checkout, the cache of the Hub,
    process ids, addresses, digests, times, computed numbers; and the lists of families and targets, which grow.
    """
    text = re.sub(r"a known family; known: [\w, ]+", "a known family; known: FAMILIES", text)
    text = re.sub(r"allowed: by_path, [\w, ]+", "allowed: TARGETS", text)
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/(?:[\w.*-]+/)*", "TMP/", text)
    text = re.sub(r"TMP/test_\w*\d\b", "TMP", text)  # pytest's folder of one test
    text = text.replace(str(Path(__file__).parents[2]), "CHECKOUT").replace(HF_HOME, "HF_HOME")
    text = re.sub(r"\b\d+(?:\.\d+)? ?(?:s|ms|MB|GB|MiB|GiB)\b", "N", text)
    return re.sub(r"0x[0-9a-f]+|\b\d\d:\d\d:\d\d\b|\b[0-9a-f]{12,}\b|\b\d{4,}\b|\b\d+\.\d{3,}\b", "N", text)


def start(update: bool) -> None:
    """Called once when pytest starts."""
    global _is_updating
    _is_updating = update


def finish() -> None:
    """Called once when pytest, or one of its processes, ends: merges what was recorded into the snapshot."""
    if not _is_updating:
        return
    with SNAPSHOT.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = json.loads(file.read() or "{}")
        file.truncate(0)
        file.write(json.dumps(dict(sorted((known | _recorded).items())), indent=1, ensure_ascii=False) + "\n")

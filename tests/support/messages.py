"""Messages to users: tests name the parts that a user needs, the key, the value and the remedy, not the whole wording."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest


@contextmanager
def refused(*parts: str, error: type[BaseException] = ValueError) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expects `error`, raised with a message that contains every one of `parts`: the key, the value, the remedy."""
    with pytest.raises(error) as caught:
        yield caught
    check_message(str(caught.value), *parts)


def check_message(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text, f"{part!r} is not in the message: {text}"


def exit_code(main: Callable[[], object], *words: object) -> int:
    with mock.patch.object(sys, "argv", ["command", *map(str, words)]), pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)

"""The messages that docs/troubleshooting.md quotes are those of the code: each is an f-string of ours, filled in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
TOLD = re.compile(r"(?:error|warning): (.+?)(?:`|$)|^(step \d.+|acceptance rate .+|does not fit: .+)$", re.MULTILINE)
QUOTED = [next(filter(None, found.groups())) for found in TOLD.finditer(PAGE)]
TELLING = 14  # fixed characters in a row that make a template one message's own


def templates() -> Iterator[tuple[str, ...]]:
    """The fixed parts, in order, of every text in the sources that can be told by them."""
    for package in ("sage", "train", "data_prep", "checkpoints"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
                fixed = tuple(piece for text in texts for piece in text.split("%s") if piece.strip())
                if max(map(len, fixed), default=0) >= TELLING:
                    yield fixed


def is_filled_in(template: tuple[str, ...], message: str) -> bool:
    """Whether a message holds a template's fixed parts in their order."""
    place = 0
    for piece in template:
        found = message.find(piece, place)
        if found < 0:
            return False
        place = found + len(piece)
    return True


@pytest.fixture(scope="module")
def said() -> set[tuple[str, ...]]:
    return set(templates())


def test_messages_are_quoted() -> None:
    assert len(QUOTED) >= 20


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_ours(message: str, said: set[tuple[str, ...]]) -> None:
    assert any(is_filled_in(template, message) for template in said), "the code says it in other words now"


def test_negative_control_other_words_are_found(said: set[tuple[str, ...]]) -> None:
    message = "d2t: has ids where it should have differences, which is bad"
    assert not any(is_filled_in(template, message) for template in said)

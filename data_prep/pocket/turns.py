"""The parts of a pocket conversation before it is put into chat messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from PIL import Image


@dataclass
class Turn:
    """A question, its answer, and single facts `(kind of word, word)` that a right answer must name."""

    question: str
    answer: str
    expect: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Story:
    """Pictures (or the frames of one clip), the talk about them, and what they show."""

    pictures: list[Image.Image]
    turns: list[Turn]
    truth: dict[str, Any] = field(default_factory=dict)
    is_clip: bool = False

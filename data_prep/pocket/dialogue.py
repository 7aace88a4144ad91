"""A generated conversation before it is rendered as chat messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from PIL import Image


@dataclass
class Turn:
    """A question, its answer, and the facts (kind, word) that a correct answer must contain."""

    question: str
    answer: str
    expect: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Dialogue:
    """Images (or the frames of one video), the turns about them, and the depicted facts, by which answers are scored."""

    images: list[Image.Image]
    turns: list[Turn]
    truth: dict[str, Any] = field(default_factory=dict)
    is_video: bool = False

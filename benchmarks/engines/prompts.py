"""The prompts of comparisons with an engine: conversations of the pocket world with one image each."""

from __future__ import annotations

from dataclasses import replace

from data_prep.conversation import Conversation
from data_prep.pocket import world

FAMILIES = ("caption", "question", "sign", "chart")  # one image each


def pocket_prompts(count: int, split: str = "test") -> list[Conversation]:
    """Returns `count` questions, the families in turns."""
    return [_question(split, number // len(FAMILIES), FAMILIES[number % len(FAMILIES)]) for number in range(count)]


def _question(split: str, index: int, family: str) -> Conversation:
    talk = world.sample(split, index, [family])
    return replace(talk, id=f"{talk.id}-{family}", family=family, messages=talk.messages[:1])

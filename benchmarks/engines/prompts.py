"""The prompts of comparisons with an engine: conversations of the pocket world with one image each."""

from __future__ import annotations

from dataclasses import replace

from data_prep.conversation import Conversation
from data_prep.pocket import world

FAMILIES = ("caption", "question", "sign", "chart")  # one image each


def pocket_prompts(count: int, split: str = "test") -> list[Conversation]:
    """Returns `count` questions, the families in turns."""
    places = [divmod(number, len(FAMILIES)) for number in range(count)]
    return [question(split, index, FAMILIES[family]) for index, family in places]


def question(split: str, index: int, family: str) -> Conversation:
    """Returns the first question of a conversation."""
    talk = world.sample(split, index, [family])
    return replace(talk, id=f"{talk.id}-{family}", family=family, messages=talk.messages[:1])

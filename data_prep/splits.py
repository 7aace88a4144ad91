"""Splits: the shares of training, validation and test items, and the split that an item belongs to.

A source either provides its own splits (the pocket world) or is divided here by a hash of each item's first image or video, so
that all conversations about one image are in one split, in any order and number of items.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from data_prep.conversation import Conversation, media_parts
from sage.inputs.messages import text_of
from sage.io.ranges import Range

Share = Annotated[float, Range(ge=0, lt=1, remedy="a share of the images (or texts)")]


class Split(StrEnum):
    """Parts of the data that share no image."""

    train = "train"
    validation = "validation"
    test = "test"


@dataclass(frozen=True)
class Shares:
    """The shares of the split groups of sources without splits of their own; both 0: every item belongs to every split."""

    validation: float = 0.0
    test: float = 0.0

    def split_of(self, group: str) -> Split:
        """Returns the split of a group, by its hash: validation, then test, then train."""
        position = group_position(group)
        if position < self.validation:
            return Split.validation
        return Split.test if position < self.validation + self.test else Split.train

    def has(self, conversation: Conversation, split: Split) -> bool:
        return not self.validation or self.split_of(split_group(conversation)) is split


def group_position(group: str) -> float:
    """Returns the position of a group from 0 to 1, uniform over groups."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") / 2**64


def split_group(conversation: Conversation) -> str:
    """Returns the key that conversations of one split group share: the first image or video, else id and question.

    Not the id alone, since there are data whose rows all have the same one.
    """
    for part in media_parts(conversation.messages):
        value = part[part["type"]]
        if isinstance(value, bytes):
            return hashlib.sha256(value).hexdigest()
        if isinstance(value, str):
            return value
    question = next((text_of(message) for message in conversation.messages if message["role"] == "user"), "")
    return f"{conversation.id}\n{question}"

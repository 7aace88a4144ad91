"""What every source offers: conversations by index, or in order for what does not fit."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

from data_prep.config import Split
from data_prep.conversation import BadItem, Conversation, check, media_parts
from sage.inputs.media import check_picture


class Source(ABC):
    """Conversations by index.

    Attributes:
        name: the file or data set, as errors name it.
        limit: how many good items to keep; 0: all.
        has_splits: the source hands out training and held-out items apart; otherwise `in_split` divides it.
        is_trusted: items are made by this package and need no check before they are used.
    """

    name: str
    limit = 0
    has_splits = False
    is_trusted = False

    @abstractmethod
    def __len__(self) -> int:
        """Number of items, broken ones included."""

    @abstractmethod
    def conversation(self, index: int) -> Conversation:
        """The item, pictures unopened.

        Raises:
            BadItem: the item is broken; names file, index and reason.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes whenever the items do."""

    def example(self, index: int) -> Conversation:
        """The item if it can be trained on, as far as can be seen without opening its pictures.

        Raises:
            BadItem: it cannot.
        """
        return as_example(self.conversation(index))

    def prompt(self, index: int) -> Conversation:
        """The item up to before its last answer, if that can be answered.

        Raises:
            BadItem: it cannot.
        """
        return as_prompt(self.conversation(index))

    def belongs(self, conversation: Conversation, split: Split, holdout: float) -> bool:
        """Whether an item is part of a split."""
        return self.has_splits or in_split(group(conversation), split, holdout)


class Stream(ABC):
    """Conversations in order, from any position, without knowing how many there are."""

    name: str

    @abstractmethod
    def iterate(self, start: int) -> Iterator[Conversation | BadItem]:
        """Items from position `start` to the end; a broken one as its error."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes whenever the items do."""


def as_example(conversation: Conversation) -> Conversation:
    """A conversation that ends with an answer, checked, as far as can be without opening its pictures.

    Raises:
        BadItem: it cannot be trained on.
    """
    return _with_media(check(conversation, need_answer=True))


def as_prompt(conversation: Conversation) -> Conversation:
    """A conversation up to before its last answer, checked.

    Raises:
        BadItem: there is nothing to answer, or a picture's file is missing.
    """
    is_asked = conversation.messages and conversation.messages[-1].get("role") == "user"
    return _with_media(check(conversation if is_asked else conversation.prompt(), need_answer=False))


def group(conversation: Conversation) -> str:
    """What must stay on one side of a split: the item's first picture, or itself."""
    for part in media_parts(conversation.messages):
        value = part[part["type"]]
        if isinstance(value, bytes):
            return hashlib.sha256(value).hexdigest()
        if isinstance(value, str):
            return value
    return conversation.id


def in_split(key: str, split: Split, holdout: float) -> bool:
    """Whether a group belongs to a split; a share `holdout` of all groups is validation, as many are test.

    Decided by the group's hash, so it does not depend on the order or number of items.
    """
    if not holdout:
        return True
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    if place < holdout:
        return split is Split.validation
    return split is Split.test if place < 2 * holdout else split is Split.train


def _with_media(conversation: Conversation) -> Conversation:
    try:
        for part in media_parts(conversation.messages):
            check_picture(part[part["type"]])
    except ValueError as error:
        raise conversation.bad(str(error)) from error
    return conversation

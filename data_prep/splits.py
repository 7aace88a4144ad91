"""Splits: the shares of training, validation and test items, and the split that an item belongs to.

A source either provides its own splits (the pocket world) or is divided here by a hash of each item's first image or video,
so that all conversations about one image are in one split, in any order and number of items. Does not own: the sources that
a configuration assigns to a split (data_prep.config.DataConfig.resolved).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Protocol

from sage.io.ranges import Range

if TYPE_CHECKING:
    from data_prep.config import DataConfig
    from data_prep.conversation import Conversation


Share = Annotated[float, Range(ge=0, lt=1, remedy="a share of the images (or texts)")]


class Items(Protocol):
    """The part of `data_prep.sources.base.Source` that the shares depend on."""

    has_splits: bool

    def __len__(self) -> int: ...

    def prompt(self, index: int) -> Conversation: ...


class Split(StrEnum):
    """Parts of the data that share no image."""

    train = "train"
    validation = "validation"
    test = "test"


@dataclass(frozen=True)
class Shares:
    """The shares of validation and test items among the split groups of sources without splits of their own.

    Attributes:
        validation, test: shares from 0 to 1; both 0: every item belongs to every split.
    """

    validation: float = 0.0
    test: float = 0.0

    def split_of(self, group: str) -> Split:
        """Returns the split of a group, by its hash: validation, then test, then train."""
        position = _position(group)
        if position < self.validation:
            return Split.validation
        return Split.test if position < self.validation + self.test else Split.train

    def has(self, conversation: Conversation, split: Split) -> bool:
        """Returns whether a conversation belongs to a split."""
        return not self.validation or self.split_of(split_group(conversation)) is split


def configured_shares(config: DataConfig) -> Shares:
    """Returns the shares of the configuration; none with separate validation sources."""
    return Shares() if config.validation else Shares(config.holdout, config.test_holdout)


def shares_of(config: DataConfig, sources: Iterable[Items]) -> Shares:
    """Returns the shares of these sources, with at least one validation prompt however small they are.

    Where no prompt falls into the configured share, the share is enlarged until it contains the first one. It depends on the
    items alone, not on their order. Reading stops at the first validation prompt.
    """
    shares = configured_shares(config)
    if not shares.validation:
        return shares
    lowest = 1.0
    for source in sources:
        if source.has_splits:
            return shares
        for row in range(len(source)):
            try:
                lowest = min(lowest, _position(split_group(source.prompt(row))))
            except ValueError:  # an invalid item, which is reported where it would be used
                continue
            if lowest < shares.validation:
                return shares
    return Shares(math.nextafter(lowest, 1), shares.test) if lowest < 1 else shares


def enclosing_holdout(group_keys: Iterable[str]) -> float | None:
    """Returns the smallest `data.holdout`, in percent steps, that contains one of the groups; None without groups."""
    lowest = min(map(_position, group_keys), default=1.0)
    return math.floor(lowest * 100 + 1) / 100 if lowest < 0.99 else None


def _position(group: str) -> float:
    """Returns the position of a group from 0 to 1, uniform over groups."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") / 2**64


def split_group(conversation: Conversation) -> str:
    """Returns the key that conversations of one split group share: path or hash of the first image or video, else the id."""
    from data_prep.conversation import media_parts

    for part in media_parts(conversation.messages):
        value = part[part["type"]]
        if isinstance(value, bytes):
            return hashlib.sha256(value).hexdigest()
        if isinstance(value, str):
            return value
    return conversation.id


def check_shares(holdout: float, test_holdout: float) -> None:
    """Raises ValueError for shares that leave no training data, or a test share without a validation share."""
    if holdout + test_holdout >= 1:
        raise ValueError(f"data.test_holdout: {test_holdout}; leaves no training data with data.holdout={holdout}; lower one")
    if test_holdout and not holdout:
        raise ValueError(f"data.test_holdout: {test_holdout}; has no effect with data.holdout=0; give a share to both")


def check_split(config: DataConfig, split: Split, label: str, has_splits: bool) -> None:
    """Raises ValueError where the test split of a source is requested and it has none (`has_splits`: of its own)."""
    if split is Split.test and not (has_splits or config.validation or config.test_holdout or not config.holdout):
        raise ValueError(f"data.test_holdout: 0.0; source {label} has no test split; give it a share, e.g. 0.1")


def check_prompts_held_out(config: DataConfig, label: str, has_splits: bool) -> None:
    """Raises ValueError where the prompts of a source would be training items; `has_splits` as for `check_split`."""
    if not (config.validation or config.holdout or has_splits):
        raise ValueError(
            f"data.holdout: 0.0; holds out no item of source {label} for validation; allowed: above 0, or prompt sources "
            f"(+data/validation=NAME, data.validation)"
        )

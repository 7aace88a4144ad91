"""Splits: the shares of training, validation and test items, and the split that an item belongs to.

A source either provides its own splits (the pocket world) or is divided here by a hash of each item's first image or video,
so that all conversations about one image are in one split, in any order and number of items. Does not own: the sources that
a configuration assigns to a split (data_prep.config.DataConfig.resolved).
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data_prep.config import DataConfig
    from data_prep.conversation import Conversation

MAX_HOLDOUT = 0.5  # validation and test take a share of `holdout` each


class Split(StrEnum):
    """Parts of the data that share no image."""

    train = "train"
    validation = "validation"
    test = "test"


def holdout_share(config: DataConfig) -> float:
    """Returns the share of the training sources that is validation (and test) data; 0 with separate validation sources."""
    return 0.0 if config.validation else config.holdout


def is_in_split(conversation: Conversation, split: Split, holdout: float) -> bool:
    """Returns whether a conversation belongs to a split.

    Args:
        holdout: share of all groups (see `split_group`) in `validation`, and the same share in `test`; 0: every
            conversation belongs to every split.
    """
    return not holdout or split_of(split_group(conversation), holdout) is split


def split_of(group: str, holdout: float) -> Split:
    """Returns the split of a group, by its hash: below `holdout` validation, below twice that test, else train."""
    position = int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") / 2**64
    if position < holdout:
        return Split.validation
    return Split.test if position < 2 * holdout else Split.train


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


def check_holdout(holdout: float) -> None:
    """Raises ValueError for a share that leaves no training data."""
    if not 0 <= holdout < MAX_HOLDOUT:
        raise ValueError(f"data.holdout: {holdout}; allowed: from 0 to below {MAX_HOLDOUT}, a share of each source")


def check_prompts_held_out(config: DataConfig, label: str, has_splits: bool) -> None:
    """Raises ValueError where the prompts of a source would be training items.

    Args:
        has_splits: whether the source provides its own splits.
    """
    if not (config.validation or config.holdout or has_splits):
        raise ValueError(
            f"data.holdout: 0.0; holds out no item of source {label} for validation; allowed: above 0, or prompt sources "
            f"(+data/validation=NAME, data.validation)"
        )

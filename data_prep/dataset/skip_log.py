"""The list of skipped items: `skipped.jsonl`, and the counts by reason shown to the user."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path

from data_prep.conversation import BadItem, BadSource, TooLong

logger = logging.getLogger(__name__)
SKIPPED = "skipped.jsonl"
REMEDY = "; data.on_bad=skip skips and lists such items"


class SkipLog:
    """A JSON-lines file of {"source", "index", "reason"}, to which several processes may append.

    Args:
        path: the file, created with the first entry.
        is_strict: whether invalid items are raised and not listed (`data.on_bad=error`). Items that are only too long are
            always listed.

    Attributes:
        items: the items skipped by this process.
    """

    def __init__(self, path: Path, is_strict: bool) -> None:
        self.path, self.is_strict = path, is_strict
        self.items: list[BadItem] = []
        self._listed = {(row["source"], row["index"]) for row in read_skipped(path)}

    def add(self, item: BadItem) -> None:
        """Lists an item, once.

        Raises:
            BadItem: the item with a remedy, if invalid items are errors.
        """
        if self.is_strict and not isinstance(item, TooLong):
            remedy = "" if isinstance(item, BadSource) else REMEDY
            raise type(item)(item.source, item.index, item.reason.removesuffix(REMEDY) + remedy) from item
        self.items.append(item)
        key = (item.source, str(item.index))
        if key in self._listed:
            return
        self._listed.add(key)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:  # one short write in append mode: lines of several processes do not mix
            file.write(json.dumps(item.as_row()) + "\n")
        logger.debug("skipped %s", item)


def read_skipped(path: Path) -> list[dict[str, str]]:
    """Returns the listed items; an item listed by several processes counts once."""
    if not path.exists():
        return []
    return unique_rows([json.loads(line) for line in path.read_text().splitlines()])


def unique_rows(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Returns one row per item, the last one."""
    return list({(row["source"], row["index"]): row for row in rows}.values())


def count_reasons(rows: list[dict[str, str]]) -> Counter[str]:
    """Counts the skipped items by reason.

    Reasons that differ only in paths, numbers and quoted text are counted together. The text of a group is the complete reason
    of its first item, with the index and id of that item.
    """
    counts = Counter(_pattern(row["reason"]) for row in rows)
    first = {_pattern(row["reason"]): row for row in reversed(rows)}
    return Counter({_example(first[pattern], count): count for pattern, count in counts.items()})


def _example(row: dict[str, str], count: int) -> str:
    return f"{row['reason']} ({'' if count == 1 else 'first: '}item {row['index']})"


def _pattern(reason: str) -> str:
    for pattern, placeholder in ((r"'[^']*'", "'..'"), (r"\S*/\S*", "..."), (r"(?<!UTF-)\d+", "N")):
        reason = re.sub(pattern, placeholder, reason)
    return reason

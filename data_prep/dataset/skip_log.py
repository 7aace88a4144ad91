"""What was left out, counted and listed: nothing disappears silently."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path

from data_prep.conversation import BadItem, BadTemplate, TooLong

logger = logging.getLogger(__name__)
REMEDY = "; data.on_bad=skip leaves such items out and lists them"


class SkipList:
    """A JSON-lines file of {"source", "index", "reason"}; several processes may append.

    Args:
        path: created with the first entry.
        strict: raise broken items instead of listing them (`data.on_bad=error`); items that are only too long are
            always listed.

    Attributes:
        items: what this process has left out.
    """

    def __init__(self, path: Path, strict: bool) -> None:
        self.path, self.strict = path, strict
        self.items: list[BadItem] = []
        self._seen = {(row["source"], row["index"]) for row in read_skipped(path)}

    def add(self, item: BadItem) -> None:
        """Lists one item, once.

        Raises:
            BadItem: the item itself and what can be done about it, where broken items are errors.
        """
        if self.strict and not isinstance(item, TooLong):
            remedy = "" if isinstance(item, BadTemplate) else REMEDY
            raise type(item)(item.source, item.index, item.reason.removesuffix(REMEDY) + remedy) from item
        self.items.append(item)
        key = (item.source, str(item.index))
        if key in self._seen:
            return
        self._seen.add(key)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:  # one short write in append mode: lines of several processes do not mix
            file.write(json.dumps(item.row()) + "\n")
        logger.debug("skipped %s", item)


def read_skipped(path: Path) -> list[dict[str, str]]:
    """The listed items; an item listed by several processes counts once."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return list({(row["source"], row["index"]): row for row in rows}.values())


def reasons(rows: list[dict[str, str]]) -> Counter[str]:
    """How many items were skipped for which kind of reason (paths, numbers and quoted values left out)."""
    return Counter(_kind(row["reason"]) for row in rows)


def _kind(reason: str) -> str:
    for pattern, stands_in in ((r"'[^']*'", "'..'"), (r"\S*/\S*", "..."), (r"(?<!UTF-)\d+", "N")):
        reason = re.sub(pattern, stands_in, reason)
    return reason[:120]

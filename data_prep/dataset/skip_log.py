"""The list of skipped items: `skipped.jsonl`, and the counts by reason shown to the user."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path

from data_prep.conversation import BadItem, BadSource, TooLong
from sage.commands.cli import EXIT_USER

logger = logging.getLogger(__name__)
SKIPPED = "skipped.jsonl"
MAX_SHOWN = 50  # invalid items named in an error; the others are listed
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


class InvalidItems(BadItem):
    """Several invalid items. The message names the first one, `details` all of them on lines of their own."""

    exit_code = EXIT_USER
    details = ""

    @classmethod
    def of(
        cls, rows: list[dict[str, str]], lines: dict[str, dict[int, int]], total: int, listing: Path, note: str = ""
    ) -> InvalidItems:
        """Returns the error.

        Args:
            rows: as listed; at least one.
            lines: source -> index of an item -> its line in the file.
            total: number of items, invalid ones included.
            listing: the file that lists them.
            note: about items that were not checked completely.
        """
        named = [{**row, "index": _with_line(row, lines)} for row in rows]
        shown = [f"{row['source']}: item {row['index']}: {row['reason']}\n" for row in named[:MAX_SHOWN]]
        if len(named) > len(shown):
            shown.append(f"and {len(named) - len(shown)} more, listed in {listing}\n")
        count = f"; {len(named)} of {total} items are invalid, all of them listed above" if len(named) > 1 else ""
        error = cls(named[0]["source"], named[0]["index"], f"{named[0]['reason']}{count}{note}{REMEDY}")
        error.details = "".join(shown) if len(named) > 1 else ""
        return error


def _with_line(row: dict[str, str], lines: dict[str, dict[int, int]]) -> str:
    """Returns the index of an item with its line: `2 (id 7), line 3`."""
    number = row["index"].split()[0]
    line = lines.get(row["source"], {}).get(int(number)) if number.isdigit() else None
    return row["index"] if line is None else f"{row['index']}, line {line}"


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

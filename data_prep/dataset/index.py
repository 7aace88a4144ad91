"""The index of a dataset, written once for all ranks and later runs: the valid items of all sources for one split.

Beside it lies `skipped.jsonl`, the list of the other items.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.cache import cache_dir, computed_once
from data_prep.config import DataConfig, OnBad
from data_prep.conversation import BadItem, BadSource, Conversation, TooLong
from data_prep.sources.base import Shares, Source, Split, with_validation_prompts
from data_prep.sources.files import KINDS
from sage.inputs.processing import Processor
from sage.io.files import json_digest
from sage.io.machine import source_digest
from sage.io.progress import progress_bar

logger = logging.getLogger(__name__)
INVALID = "bad.npy"  # the invalid items, which are checked again: a missing image may have been restored
NUM_PROBED = 1000  # rows, to distinguish one invalid item from a source without valid ones
# Increase these with every change of the code that changes which items are valid; an example, or the files of a store.
INDEX_VERSION, EXAMPLE_VERSION = 2, 3
SKIPPED = "skipped.jsonl"
REMEDY = "; data.on_bad=skip skips and lists such items"


class Index:
    """The valid items of all sources; `fingerprint` is a hash of their content."""

    def __init__(self, folder: Path, sources: list[Source]) -> None:
        self.folder, self.sources = folder, sources
        self.source, self.row = np.load(folder / "index.npy")  # number of the source, and index in it, int64 [N]
        self.fingerprint = json_digest([folder.name, hashlib.sha256((folder / "index.npy").read_bytes()).hexdigest()])

    def __len__(self) -> int:
        return len(self.row)

    def conversation(self, position: int) -> Conversation:
        """Returns the item at a position without opening its images; BadItem if it is invalid."""
        return self.sources[int(self.source[position])].conversation(int(self.row[position]))

    def of_source(self, number: int) -> Index:
        """Returns the items of one source."""
        items = copy(self)
        items.source, items.row = (column[self.source == number] for column in (self.source, self.row))
        return items


def prepare_index(config: DataConfig, sources: list[Source], split: Split) -> Index:
    """Validates every item, except for its pixels; from the cache if no invalid one has changed. ValueError without any."""
    shares = with_validation_prompts(config.shares, sources)
    settings = {"split": split, "shares": asdict(shares), "on_bad": config.on_bad}
    content = [(source.fingerprint(), source.limit) for source in sources]
    readers = {KINDS[source.kind].module for source in config.resolved(split).values()}
    code = source_digest(*sorted(name for name in readers if not name.startswith("data_prep.")))
    folder = cache_dir(config.cache_dir) / "index" / json_digest([settings, content, code, INDEX_VERSION])
    write = partial(_write_index, config, sources, split, shares)
    with computed_once(folder, write, lambda: has_repaired_item(folder, lambda number, row: sources[number].example(row))):
        return Index(folder, sources)


def result_folder(config: DataConfig, index: Index, processor: Processor, kind: str, *settings: Any) -> Path:
    """Returns the folder in the cache of a result that depends on the items of an index, the processor and these settings."""
    backend = getattr(processor.tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else sorted(processor.tokenizer.get_vocab().items())
    image = processor.image_processor.to_dict() if processor.image_processor is not None else {}
    code = [vocabulary, processor.chat_template, image, processor.family.model_type, processor.thinking]
    key = [index.fingerprint, config.num_frames, json_digest(code), EXAMPLE_VERSION, settings]
    return cache_dir(config.cache_dir) / kind / json_digest(key)


def has_repaired_item(folder: Path, use: Callable[..., object]) -> bool:
    """Returns whether an item that was invalid when `folder` was written is valid now."""
    for position in np.load(folder / INVALID).tolist():
        try:
            use(*position)
        except TooLong:
            pass
        except BadItem:
            continue
        logger.info("%s: an invalid item has been repaired; preparing again", folder)
        return True
    return False


def no_item_message(config: DataConfig, sources: list[Source], split: Split, skipped: list[BadItem]) -> str:
    names = ", ".join(source.name for source in sources)
    if num_valid := sum(map(len, sources)) - len(skipped):  # all in other splits
        return (
            f"data.holdout: {config.holdout}; leaves none of {num_valid} items in {names} for {split}, since items of one "
            f"image stay together; add items about other images, or give separate validation prompts (+data/validation=NAME)"
        )
    counts = count_reasons([item.as_row() for item in skipped]).most_common(1)
    reason = "".join(f"; {count} x {text}" for text, count in counts) or "; it is empty"
    return f"data.sources: no valid item for {split} in {names}{reason}; repair the items, or give another data.path"


def _write_index(config: DataConfig, sources: list[Source], split: Split, shares: Shares, folder: Path) -> None:
    skipped = SkipLog(folder / SKIPPED, is_strict=config.on_bad is OnBad.error)
    valid: list[tuple[int, int]] = []
    invalid: list[tuple[int, int]] = []
    for number, source in enumerate(sources):
        before = len(valid)
        for row in progress_bar(range(len(source)), f"checking {source.name}"):
            if source.limit and len(valid) - before == source.limit:
                break
            try:
                if source.is_trusted or source.belongs_to(source.example(row), split, shares):
                    valid.append((number, row))
            except BadItem as error:
                skipped.add(_with_extent(error, source, row) if skipped.is_strict else error)
                invalid.append((number, row))
        logger.info("%s: %d of %d items are for %s", source.name, len(valid) - before, len(source), split)
    if not valid:
        raise ValueError(no_item_message(config, sources, split, skipped.items))
    np.save(folder / "index.npy", np.array(valid, dtype=np.int64).T)
    np.save(folder / INVALID, np.array(invalid, dtype=np.int64).reshape(-1, 2))


def _with_extent(error: BadItem, source: Source, row: int) -> BadItem:
    """Returns the error of a row with the number of invalid rows among those that follow."""
    last, num_invalid = min(row + NUM_PROBED, len(source)), 1
    for other in range(row + 1, last):
        try:
            source.example(other)
        except BadItem:
            num_invalid += 1
    if num_invalid == 1:
        return error
    if num_invalid == last:
        return BadSource(error.source, error.index, f"{error.reason} (all of the first {last} items are invalid)")
    extent = f"{num_invalid} of the {last - row} items from here on are invalid"
    return BadItem(error.source, error.index, f"{error.reason} ({extent})")


class SkipLog:
    """A JSON-lines file of {"source", "index", "kind", "reason"}, to which several processes may append.

    With `is_strict` (`data.on_bad=error`), invalid items are raised and not listed; those that are only too long are listed.
    """

    def __init__(self, path: Path, is_strict: bool) -> None:
        self.path, self.is_strict = path, is_strict
        self.items: list[BadItem] = []  # those of this process
        self._listed = {(row["source"], row["index"]) for row in read_skipped(path)}

    def add(self, item: BadItem) -> None:
        """Lists an item, once; raises it with a remedy if invalid items are errors."""
        if self.is_strict and not isinstance(item, TooLong):
            remedy = "" if isinstance(item, BadSource) else REMEDY
            raise type(item)(item.source, item.index, item.reason.removesuffix(REMEDY) + remedy) from item
        self.items.append(item)
        self.write(item.as_row())
        logger.debug("skipped %s", item)

    def write(self, row: dict[str, str]) -> None:
        """Lists a row of `read_skipped`, once."""
        key = (row["source"], row["index"])
        if key not in self._listed:
            self._listed.add(key)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:  # one short write in append mode: lines of several processes do not mix
                file.write(json.dumps(row) + "\n")


def read_skipped(path: Path) -> list[dict[str, str]]:
    """Returns the listed items; an item listed by several processes counts once."""
    return unique_rows([json.loads(line) for line in path.read_text().splitlines()]) if path.exists() else []


def unique_rows(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Returns one row per item, the last one."""
    return list({(row["source"], row["index"]): row for row in rows}.values())


def count_reasons(rows: list[dict[str, str]]) -> Counter[str]:
    """Counts the skipped items by the reason of their first one, regardless of the paths, numbers and quoted text in it."""
    groups: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault(re.sub(r"'[^']*'|\S*/\S*|(?<!UTF-)\d+", "..", row["reason"]), []).append(row)
    firsts = {f"{rows[0]['reason']} ({'first: ' if rows[1:] else ''}item {rows[0]['index']})": rows for rows in groups.values()}
    return Counter({text: len(rows) for text, rows in firsts.items()})

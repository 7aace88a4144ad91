"""Preparation of a dataset, once for all ranks and later runs: the index of valid items, and the cached examples.

Owns: the cache keys, the pass over the sources, the lock. A prepared folder is complete or absent.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import data_prep
import sage.inputs
import sage.targets
from data_prep.chat import Example, Lengths, encode_example, example_lengths, shorten_example
from data_prep.config import DataConfig, OnBad
from data_prep.conversation import BadItem, BadSource, Conversation, TooLong
from data_prep.dataset.example_store import ExampleStore, Packed, pack, write_examples
from data_prep.dataset.lengths import as_array, find_long
from data_prep.dataset.pixel_codec import PixelTable
from data_prep.dataset.skip_log import SKIPPED, SkipLog, count_reasons
from data_prep.files import OTHER_CACHE, default_cache_dir, locked, prune_folders, writing
from data_prep.sources.base import Source
from data_prep.splits import Shares, Split, shares_of
from data_prep.workers import num_processes, start_worker, worker_context
from sage.inputs.processing import Processor
from sage.io.files import json_digest
from sage.io.progress import progress_bar

logger = logging.getLogger(__name__)
Item = tuple[str, int, Packed]  # id, source number, fields
Encoded = tuple[Item | BadItem, Lengths | None]
STORE = "store"
LENGTHS = "lengths.npy"  # of every example before it is shortened
INVALID = "bad.npy"  # the invalid items, which are checked again: a missing image may have been restored
NUM_PROBED = 1000  # rows, to distinguish one invalid item from a source without valid ones
CHUNK_SIZE = 64  # examples per task of a worker
MIN_PARALLEL = 20_000  # items; below, starting workers (seconds each, to import torch) costs more than it saves


class Index:
    """The valid items of all sources.

    Attributes:
        source: source of each item, int64 [N].
        row: index of each item in its source, int64 [N].
        folder: the folder of the index; its `skipped.jsonl` lists the other items.
        fingerprint: content hash of the items.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source, self.row = np.load(folder / "index.npy")
        self.fingerprint = content_hash(folder.name, hashlib.sha256((folder / "index.npy").read_bytes()).hexdigest())

    def __len__(self) -> int:
        return len(self.row)


def prepare_index(config: DataConfig, sources: list[Source], split: Split) -> Index:
    """Validates every item, except for its pixels, and returns the index; from the cache if no invalid item has changed.

    Raises:
        BadItem: an item is invalid and `on_bad` is `error`.
        ValueError: there is no valid item.
    """
    shares = shares_of(config, sources)
    settings = {"split": split, "shares": asdict(shares), "on_bad": config.on_bad}
    content = [(source.fingerprint(), source.limit) for source in sources]
    folder = default_cache_dir(config.cache_dir) / "index" / content_hash(settings, content, code_fingerprint())
    with locked(folder, OTHER_CACHE):
        if not folder.exists() or _has_repaired_item(folder, partial(_check_row, sources)):
            with writing(folder, OTHER_CACHE) as temporary:
                _write_index(config, sources, split, shares, temporary)
        return Index(folder)


def prepare_examples(config: DataConfig, sources: list[Source], index: Index, processor: Processor) -> ExampleStore:
    """Encodes every item of an index, or returns the cached examples if no invalid item has changed.

    Raises:
        BadItem: an image is invalid and `on_bad` is `error`.
    """
    settings = {"max_length": config.max_length, "on_long": config.on_long, "num_frames": config.num_frames}
    key = content_hash(index.fingerprint, settings, processor_fingerprint(processor), code_fingerprint())
    folder = default_cache_dir(config.cache_dir) / "examples" / key
    with locked(folder, OTHER_CACHE):
        if not folder.exists() or _has_repaired_item(folder, partial(_encode, config, sources, index, processor)):
            with writing(folder, OTHER_CACHE) as temporary:
                _write_examples(config, sources, index, processor, temporary)
            if config.cache_keep is not None:
                prune_folders(folder.parent, config.cache_keep)
        os.utime(folder, ns=(time.time_ns(),) * 2)  # the file system's own time stamps have a resolution of milliseconds
        return ExampleStore(folder / STORE)


def content_hash(*parts: Any) -> str:
    """Returns 32 hexadecimal digits of the hash of the parts' JSON."""
    return json_digest(parts)


def processor_fingerprint(processor: Processor) -> str:
    """Returns a hash of tokenizer, chat template, image processor and family."""
    backend = getattr(processor.tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else sorted(processor.tokenizer.get_vocab().items())
    image = processor.image_processor.to_dict() if processor.image_processor is not None else {}
    return content_hash(vocabulary, processor.chat_template, image, processor.family.model_type)


@cache
def code_fingerprint() -> str:
    """Returns a hash of the code that turns data into examples: a cache is not used with another version of it."""
    folders = (Path(package.__path__[0]) for package in (data_prep, sage.inputs, sage.targets))
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return content_hash([hashlib.sha256(path.read_bytes()).hexdigest() for path in files])


def _has_repaired_item(folder: Path, use: Callable[..., object]) -> bool:
    """Returns whether an item that was invalid when `folder` was written is valid now."""
    for place in np.load(folder / INVALID).tolist():
        try:
            use(*place)
        except TooLong:
            pass
        except BadItem:
            continue
        logger.info("%s: an invalid item has been repaired; preparing again", folder)
        return True
    return False


def _check_row(sources: list[Source], number: int, row: int) -> None:
    sources[number].example(row)


def _encode(
    config: DataConfig, sources: list[Source], index: Index, processor: Processor, position: int
) -> tuple[Conversation, Example]:
    """Returns the conversation at a position of the index and its example, however long it is.

    Raises:
        BadItem: it is invalid.
    """
    conversation = sources[int(index.source[position])].conversation(int(index.row[position]))
    return conversation, encode_example(conversation, processor, config.num_frames)


# -- the index ----------------------------------------------------------------------------------------------------------


def _write_index(config: DataConfig, sources: list[Source], split: Split, shares: Shares, folder: Path) -> None:
    folder.mkdir(parents=True)
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
        raise ValueError(_no_item_message(config, sources, split, skipped.items))
    np.save(folder / "index.npy", np.array(valid, dtype=np.int64).T)
    np.save(folder / INVALID, np.array(invalid, dtype=np.int64).reshape(-1, 2))


def _with_extent(error: BadItem, source: Source, row: int) -> BadItem:
    """Returns the error of a row with the number of invalid rows among those that follow."""
    last = min(row + NUM_PROBED, len(source))
    num_invalid = 1 + sum(_is_invalid(source, other) for other in range(row + 1, last))
    if num_invalid == 1:
        return error
    if num_invalid == last:
        return BadSource(error.source, error.index, f"{error.reason} (all of the first {last} items are invalid)")
    extent = f"{num_invalid} of the {last - row} items from here on are invalid"
    return BadItem(error.source, error.index, f"{error.reason} ({extent})")


def _is_invalid(source: Source, row: int) -> bool:
    try:
        source.example(row)
    except BadItem:
        return True
    return False


def _no_item_message(config: DataConfig, sources: list[Source], split: Split, skipped: list[BadItem]) -> str:
    names = ", ".join(source.name for source in sources)
    num_valid = sum(map(len, sources)) - len(skipped)
    if num_valid:  # all in other splits
        return (
            f"data.holdout: {config.holdout}; leaves none of {num_valid} items in {names} for {split}, since items of one "
            f"image stay together; add items about other images, or give separate validation prompts (+data/validation=NAME)"
        )
    counts = count_reasons([item.as_row() for item in skipped]).most_common(1)
    reason = "".join(f"; {count} x {text}" for text, count in counts) or "; it is empty"
    return f"data.sources: no valid item for {split} in {names}{reason}; repair the items, or give another data.path"


# -- the examples -------------------------------------------------------------------------------------------------------


def _write_examples(config: DataConfig, sources: list[Source], index: Index, processor: Processor, folder: Path) -> None:
    folder.mkdir(parents=True)
    table = PixelTable.measure(processor)
    skipped = SkipLog(folder / SKIPPED, is_strict=config.on_bad is OnBad.error)
    invalid: list[int] = []
    measured: list[Lengths] = []

    def valid() -> Iterator[Item]:
        encoded = _encode_all(_Encoder(config, sources, index, processor, table), len(index))
        for position, (item, lengths) in enumerate(progress_bar(encoded, "preparing", len(index))):
            measured.extend([lengths] if lengths else [])
            if not isinstance(item, BadItem):
                yield item
                continue
            skipped.add(item)
            if not isinstance(item, TooLong):
                invalid.append(position)

    number = write_examples(folder / STORE, valid(), table)
    np.save(folder / INVALID, np.array(invalid, dtype=np.int64).reshape(-1, 1))
    np.save(folder / LENGTHS, as_array(measured))
    find_long(config, measured, len(measured)).check()
    if not number:
        raise ValueError(_no_item_message(config, sources, Split.train, skipped.items))
    logger.info("prepared %d examples, skipped %d", number, len(index) - number)


class _Encoder:
    """Position in the index -> packed example or its error, and its lengths; runs in worker processes."""

    def __init__(
        self, config: DataConfig, sources: list[Source], index: Index, processor: Processor, table: PixelTable
    ) -> None:
        self.config, self.sources, self.index, self.processor, self.table = config, sources, index, processor, table

    def __call__(self, position: int) -> Encoded:
        config, lengths = self.config, None
        try:
            conversation, full = _encode(config, self.sources, self.index, self.processor, position)
            lengths = example_lengths(full)
            example = shorten_example(conversation, full, self.processor, config.max_length, config.on_long, config.num_frames)
        except BadItem as error:
            return error, lengths
        return (conversation.id, int(self.index.source[position]), pack(example, self.table)), lengths


def _encode_all(encoder: _Encoder, total: int) -> Iterator[Encoded]:
    """Yields the results in order, from several processes if there are enough items."""
    processes = num_processes()
    if total < MIN_PARALLEL or processes < 2:
        yield from map(encoder, range(total))
        return
    with worker_context().Pool(processes, initializer=_start_worker, initargs=(encoder,)) as pool:
        yield from pool.imap(_encode_one, range(total), chunksize=CHUNK_SIZE)


_worker: list[_Encoder] = []


def _start_worker(encoder: _Encoder) -> None:
    start_worker()
    _worker[:] = [encoder]


def _encode_one(position: int) -> Encoded:
    return _worker[0](position)

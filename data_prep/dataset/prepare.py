"""Examples of a dataset that are encoded once, for all ranks and later runs."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.cache import cache_dir, computed_once
from data_prep.chat import Example, Lengths, encode_example, example_lengths, shorten_example
from data_prep.config import DataConfig, OnBad
from data_prep.conversation import BadItem, Conversation, TooLong
from data_prep.dataset.example_store import ExampleStore, Packed, PixelTable, pack, write_examples
from data_prep.dataset.index import INVALID, Index, has_repaired_item, no_item_message
from data_prep.dataset.lengths import as_array, find_long
from data_prep.dataset.skip_log import SKIPPED, SkipLog
from data_prep.splits import Split
from data_prep.workers import mapped
from sage.inputs.processing import Processor
from sage.io.files import json_digest
from sage.io.progress import progress_bar

logger = logging.getLogger(__name__)
Item = tuple[str, int, Packed]  # id, source number, fields
Encoded = tuple[Item | BadItem, Lengths | None]
STORE = "store"
LENGTHS = "lengths.npy"  # of every example before it is shortened
CHUNK_SIZE = 64  # examples per task of a worker
VERSION = 3  # of cached examples: increase it with every change of the code that changes an example, or the files of a store


def prepare_examples(config: DataConfig, index: Index, processor: Processor) -> ExampleStore:
    """Encodes every item of an index, or returns the cached examples if no invalid item has changed."""
    folder = result_folder(config, index, processor, "examples", config.max_length, config.on_long)
    write = partial(_write_examples, config, index, processor)
    with computed_once(folder, write, lambda: has_repaired_item(folder, partial(_encode, config, index, processor))):
        os.utime(folder, ns=(time.time_ns(),) * 2)  # the file system's own time stamps have a resolution of milliseconds
        if config.cache_keep is not None:
            _prune(folder.parent, config.cache_keep)
        return ExampleStore(folder / STORE)


def result_folder(config: DataConfig, index: Index, processor: Processor, kind: str, *settings: Any) -> Path:
    """Returns the folder in the cache of a result that depends on the items of an index, the processor and these settings."""
    key = [index.fingerprint, config.num_frames, _fingerprint(processor), VERSION, settings]
    return cache_dir(config.cache_dir) / kind / json_digest(key)


def _fingerprint(processor: Processor) -> str:
    """Returns a hash of tokenizer, chat template, image processor and family."""
    backend = getattr(processor.tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else sorted(processor.tokenizer.get_vocab().items())
    image = processor.image_processor.to_dict() if processor.image_processor is not None else {}
    return json_digest([vocabulary, processor.chat_template, image, processor.family.model_type, processor.thinking])


def _prune(parent: Path, num_kept: int) -> None:
    """Deletes the least recently used subfolders but `num_kept`. Files that a process has open stay readable for it."""
    found = sorted((path for path in parent.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in found[: max(0, len(found) - num_kept)]:
        shutil.rmtree(path, ignore_errors=True)
        logger.info("%s: deleted as least recently used", path)


def _encode(config: DataConfig, index: Index, processor: Processor, position: int) -> tuple[Conversation, Example]:
    """Returns the conversation at a position of the index and its example, however long it is; BadItem if it is invalid."""
    conversation = index.conversation(position)
    return conversation, encode_example(conversation, processor, config.num_frames)


def _write_examples(config: DataConfig, index: Index, processor: Processor, folder: Path) -> None:
    folder.mkdir(parents=True)
    table = PixelTable.measure(processor)
    skipped = SkipLog(folder / SKIPPED, is_strict=config.on_bad is OnBad.error)
    invalid: list[int] = []
    measured: list[Lengths] = []

    def valid() -> Iterator[Item]:
        pack_one = partial(_pack, config, index, processor, table)
        encoded = mapped(pack_one, range(len(index)), len(index), CHUNK_SIZE)
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
        raise ValueError(no_item_message(config, index.sources, Split.train, skipped.items))
    logger.info("prepared %d examples, skipped %d", number, len(index) - number)


def _pack(config: DataConfig, index: Index, processor: Processor, table: PixelTable, position: int) -> Encoded:
    """Returns the packed example at a position of the index, or its error, and its lengths; runs in worker processes."""
    lengths = None
    try:
        conversation, full = _encode(config, index, processor, position)
        lengths = example_lengths(full)
        example = shorten_example(conversation, full, processor, config.max_length, config.on_long, config.num_frames)
    except BadItem as error:
        return error, lengths
    return (conversation.id, int(index.source[position]), pack(example, table)), lengths

"""Prepared once, used by every rank and every later run: which items are good and, if asked, their ready-made examples.

Owns: the cache keys, the pass over the sources, the lock. A prepared folder appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import data_prep
import sage.inputs
import sage.targets
from data_prep.chat import Example, build_example
from data_prep.config import DataConfig, OnBad, Split
from data_prep.conversation import BadItem, Conversation, TooLong
from data_prep.dataset.example_store import ExampleStore, Packed, pack, write
from data_prep.dataset.pixel_codec import PixelTable
from data_prep.dataset.skip_log import SkipList, reasons
from data_prep.files import atomic_path, default_cache_dir, locked, prune
from data_prep.progress import with_progress
from data_prep.sources.base import Source
from sage.inputs.processing import Processor

logger = logging.getLogger(__name__)
Item = tuple[str, int, Packed]  # id, source number, fields
SKIPPED, STORE = "skipped.jsonl", "store"
BAD = "bad.npy"  # which items were broken, to be looked at again: a missing picture may have come back
KEPT = 8  # prepared sets of examples that stay in the cache folder; each may be hundreds of MB
CHUNK = 64  # examples handed to a worker at once
PARALLEL_FROM = 20_000  # below this, starting workers (seconds: each imports torch) costs more than they save


class Index:
    """The good items of all sources.

    Attributes:
        source: which source, int64 [N].
        row: which item of it, int64 [N].
        folder: where the index is kept; `skipped.jsonl` in it lists the rest.
        fingerprint: content hash of the items.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source, self.row = np.load(folder / "index.npy")
        self.fingerprint = content_hash(folder.name, hashlib.sha256((folder / "index.npy").read_bytes()).hexdigest())

    def __len__(self) -> int:
        return len(self.row)


def prepare_index(config: DataConfig, sources: list[Source], split: Split) -> Index:
    """Checks every item (all but its pixels) once and keeps which are good; again when one that was broken is good now.

    Raises:
        BadItem: the first broken item, where `on_bad` is `error`.
        ValueError: nothing is left.
    """
    settings = {"split": split, "holdout": _holdout(config), "on_bad": config.on_bad}
    kept = [(source.fingerprint(), source.limit) for source in sources]
    key = content_hash(settings, kept, code_fingerprint())
    folder = default_cache_dir(config.cache_dir) / "index" / key
    with locked(folder):
        if not folder.exists() or _is_mended(folder, partial(_check_row, sources)):
            with atomic_path(folder) as temporary:
                _write_index(config, sources, split, temporary)
        return Index(folder)


def prepare_examples(config: DataConfig, sources: list[Source], index: Index, processor: Processor) -> ExampleStore:
    """Encodes every item of an index once; broken pictures are found here, and whether they were mended since.

    Raises:
        BadItem: the first broken item, where `on_bad` is `error`.
    """
    settings = {"max_length": config.max_length, "on_long": config.on_long, "num_frames": config.num_frames}
    key = content_hash(index.fingerprint, settings, processor_fingerprint(processor), code_fingerprint())
    folder = default_cache_dir(config.cache_dir) / "examples" / key
    with locked(folder):
        if not folder.exists() or _is_mended(folder, partial(_build, config, sources, index, processor)):
            with atomic_path(folder) as temporary:
                _write_examples(config, sources, index, processor, temporary)
            prune(folder.parent, KEPT)
        os.utime(folder, ns=(time.time_ns(),) * 2)  # the kernel's own stamp is milliseconds coarse
        return ExampleStore(folder / STORE)


def content_hash(*parts: Any) -> str:
    """32 hex digits of the parts' JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def processor_fingerprint(processor: Processor) -> str:
    """Changes with the tokenizer, the template, the image processor or the family."""
    backend = getattr(processor.tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else sorted(processor.tokenizer.get_vocab().items())
    image = processor.image_processor.to_dict() if processor.image_processor is not None else {}
    return content_hash(vocabulary, processor.chat_template, image, processor.family.model_type)


@cache
def code_fingerprint() -> str:
    """Changes with the code that turns data into examples, so that no cache outlives a repair."""
    folders = (Path(package.__path__[0]) for package in (data_prep, sage.inputs, sage.targets))
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return content_hash([hashlib.sha256(path.read_bytes()).hexdigest() for path in files])


def _holdout(config: DataConfig) -> float:
    return 0.0 if config.validation else config.holdout


def _is_mended(folder: Path, use: Callable[..., object]) -> bool:
    """Whether one of the items that were broken when `folder` was made can be used by now."""
    for place in np.load(folder / BAD).tolist():
        try:
            use(*place)
        except TooLong:
            pass
        except BadItem:
            continue
        logger.info("%s: an item that was broken is whole now; prepared again", folder)
        return True
    return False


def _check_row(sources: list[Source], number: int, row: int) -> None:
    sources[number].example(row)


def _build(
    config: DataConfig, sources: list[Source], index: Index, processor: Processor, position: int
) -> tuple[Conversation, Example]:
    """What is at a position of the index.

    Raises:
        BadItem: it is broken or too long.
    """
    conversation = sources[int(index.source[position])].conversation(int(index.row[position]))
    return conversation, build_example(conversation, processor, config.max_length, config.on_long, config.num_frames)


def _write_index(config: DataConfig, sources: list[Source], split: Split, folder: Path) -> None:
    folder.mkdir(parents=True)
    skipped = SkipList(folder / SKIPPED, strict=config.on_bad is OnBad.error)
    good: list[tuple[int, int]] = []
    bad: list[tuple[int, int]] = []
    for number, source in enumerate(sources):
        before = len(good)
        for row in with_progress(range(len(source)), len(source), f"checking {source.name}:"):
            if source.limit and len(good) - before == source.limit:
                break
            try:
                if source.is_trusted or source.belongs(source.example(row), split, _holdout(config)):
                    good.append((number, row))
            except BadItem as error:
                skipped.add(error)
                bad.append((number, row))
        logger.info("%s: %d of %d items", source.name, len(good) - before, len(source))
    if not good:
        names = ", ".join(source.name for source in sources)
        why = "".join(
            f"; {count} x {reason}" for reason, count in reasons([item.row() for item in skipped.items]).most_common(1)
        )
        raise ValueError(f"data.sources: no usable item for {split} in {names}{why}; see data.on_bad and data.holdout")
    np.save(folder / "index.npy", np.array(good, dtype=np.int64).T)
    np.save(folder / BAD, np.array(bad, dtype=np.int64).reshape(-1, 2))


def _write_examples(config: DataConfig, sources: list[Source], index: Index, processor: Processor, folder: Path) -> None:
    folder.mkdir(parents=True)
    table = PixelTable.measure(processor)
    skipped = SkipList(folder / SKIPPED, strict=config.on_bad is OnBad.error)
    bad: list[int] = []

    def good() -> Iterator[Item]:
        encoded = _encode_all(_Encoder(config, sources, index, processor, table), len(index))
        for position, item in enumerate(with_progress(encoded, len(index), "preparing")):
            if not isinstance(item, BadItem):
                yield item
                continue
            skipped.add(item)
            if not isinstance(item, TooLong):
                bad.append(position)

    number = write(folder / STORE, good(), table)
    np.save(folder / BAD, np.array(bad, dtype=np.int64).reshape(-1, 1))
    if not number:
        raise ValueError(f"data.sources: not one of {len(index)} items became an example; see data.max_length")
    logger.info("prepared %d examples, skipped %d", number, len(index) - number)


class _Encoder:
    """Position in the index -> packed example, or why not; runs in worker processes."""

    def __init__(
        self, config: DataConfig, sources: list[Source], index: Index, processor: Processor, table: PixelTable
    ) -> None:
        self.config, self.sources, self.index, self.processor, self.table = config, sources, index, processor, table

    def __call__(self, position: int) -> Item | BadItem:
        try:
            conversation, example = _build(self.config, self.sources, self.index, self.processor, position)
        except BadItem as error:
            return error
        return conversation.id, int(self.index.source[position]), pack(example, self.table)


def _encode_all(encoder: _Encoder, total: int) -> Iterator[Item | BadItem]:
    """Results in order. Several processes where there is enough to do; the order does not depend on them."""
    processes = num_processes()
    if total < PARALLEL_FROM or processes < 2:
        yield from map(encoder, range(total))
        return
    context = worker_context()
    with context.Pool(processes, initializer=_start_worker, initargs=(encoder,)) as pool:
        yield from pool.imap(_encode_one, range(total), chunksize=CHUNK)


def num_processes() -> int:
    """Worker processes that preparing may use."""
    return min(len(os.sched_getaffinity(0)), 16)


def worker_context() -> Any:
    """Processes that inherit nothing (threads and CUDA do not survive a fork) and import torch once between them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["data_prep.chat"])
    return context


def end_with_parent() -> None:
    """Ends this worker once the process that wanted it is gone, even when that was killed.

    To the system a worker's parent is the fork server, which lives as long as its workers do.
    """

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


_worker: list[_Encoder] = []


def _start_worker(encoder: _Encoder) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    _worker[:] = [encoder]


def _encode_one(position: int) -> Item | BadItem:
    return _worker[0](position)

"""Builds datasets and prompts from a `DataConfig`: the entry points that connect the rooms of this package."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.config import Cache, DataConfig, OnBad, SourceConfig, validate
from data_prep.conversation import BadItem, Conversation
from data_prep.dataset.dataset import ConversationDataset, StoredDataset, skip_path
from data_prep.dataset.prepare import content_hash, prepare_examples, prepare_index
from data_prep.dataset.skip_log import SKIPPED, SkipLog, count_reasons, read_skipped
from data_prep.dataset.stream import StreamDataset
from data_prep.files import default_cache_dir
from data_prep.sources import open_source, open_stream
from data_prep.sources.base import Source, Stream, as_prompt
from data_prep.splits import Split, check_prompts_held_out, holdout_share, is_in_split
from sage.inputs.processing import Processor

logger = logging.getLogger(__name__)
NUM_LOGGED_REASONS = 5


def build_dataset(config: DataConfig, processor: Processor, split: str = "train") -> Any:
    """Builds the dataset of a split; its preparation is cached.

    Args:
        processor: the target's processor.
        split: `train`, `validation` or `test`.

    Returns:
        A dataset for `StepLoader`.

    Raises:
        ValueError: a setting or a file is wrong.
        BadItem: an item is invalid and `data.on_bad` is `error`.
    """
    validate(config)
    part = Split(split)
    if any(source.streaming for source in config.resolved(part).values()):
        return _build_stream(config, processor, part)
    sources = open_sources(config, part)
    index = prepare_index(config, sources, part)
    skip_logs = [index.folder / SKIPPED]
    weights = config.source_weights() if part is Split.train else None
    dataset: Any
    if config.cache is Cache.examples:
        store = prepare_examples(config, sources, index, processor)
        skip_logs.append(store.folder.parent / SKIPPED)
        dataset = StoredDataset(store, weights, store.folder.parent.name)
    else:
        dataset = ConversationDataset(config, sources, index, processor, weights)
    _report_skipped(skip_logs, skip_path(config, index))
    return dataset


def prompts(config: DataConfig, split: str = "validation", num_prompts: int = 8) -> list[Conversation]:
    """Returns held-out prompts: the messages before the last answer, which goes to `meta["answer"]`.

    Prompts alternate between the sources, so that a few of them represent all sources.

    Raises:
        ValueError: a setting or a file is wrong, or there are no prompts.
    """
    validate(config)
    part = Split(split)
    listing = Path(config.bad_list) if config.bad_list else default_cache_dir(config.cache_dir) / "prompts" / SKIPPED
    skipped = SkipLog(listing, is_strict=config.on_bad is OnBad.error)
    readers = [_prompts_of(config, label, source, part, skipped) for label, source in config.resolved(part).items()]
    found: list[Conversation] = []
    while readers and len(found) < num_prompts:
        for reader in list(readers):
            conversation = next(reader, None)
            if conversation is None:
                readers.remove(reader)
            elif len(found) < num_prompts:
                found.append(conversation)
    if skipped.items:
        logger.warning("skipped %d prompts; listed in %s", len(skipped.items), listing)
    if not found:
        raise ValueError(f"data.validation: no prompt for split {part}; name prompt sources or raise data.holdout")
    return found


def open_sources(config: DataConfig, split: Split) -> list[Source]:
    """Opens the sources of a split, in the order of the config."""
    return [open_source(label, source, split, config.cache_dir) for label, source in config.resolved(split).items()]


def _build_stream(config: DataConfig, processor: Processor, split: Split) -> StreamDataset:
    streams = [open_stream(label, source, split) for label, source in config.resolved(split).items()]
    folder = default_cache_dir(config.cache_dir) / "streams" / content_hash([stream.fingerprint() for stream in streams])
    return StreamDataset(config, streams, processor, Path(config.bad_list or folder / SKIPPED))


def _prompts_of(
    config: DataConfig, label: str, source_config: SourceConfig, split: Split, skipped: SkipLog
) -> Iterator[Conversation]:
    """Opens a source immediately, so that mistakes are found, and returns an iterator over its prompts of a split."""
    holdout = holdout_share(config)
    if source_config.streaming:
        stream = open_stream(label, source_config, split)
        check_prompts_held_out(config, label, has_splits=False)
        return _stream_prompts(stream, split, holdout, skipped)
    source = open_source(label, source_config, split, config.cache_dir)
    check_prompts_held_out(config, label, source.has_splits)
    return _source_prompts(source, split, holdout, skipped)


def _source_prompts(source: Source, split: Split, holdout: float, skipped: SkipLog) -> Iterator[Conversation]:
    for row in range(len(source)):
        try:
            found = source.prompt(row)
        except BadItem as error:
            skipped.add(error)
            continue
        if source.belongs_to(found, split, holdout):
            yield found


def _stream_prompts(stream: Stream, split: Split, holdout: float, skipped: SkipLog) -> Iterator[Conversation]:
    for item in stream.iterate(0):
        try:
            if isinstance(item, BadItem):
                raise item
            found = as_prompt(item)
        except BadItem as error:
            skipped.add(error)
            continue
        if is_in_split(found, split, holdout):
            yield found


def _report_skipped(skip_logs: list[Path], target: Path) -> None:
    """Logs the skipped items by reason, and lists all of them in `target`."""
    rows = [row for path in skip_logs for row in read_skipped(path)]
    if not rows:
        return
    listed = SkipLog(target, is_strict=False)
    for row in rows:
        if target not in skip_logs:
            listed.add(BadItem(row["source"], row["index"], row["reason"]))
    counts = ", ".join(f"{count} x {reason}" for reason, count in count_reasons(rows).most_common(NUM_LOGGED_REASONS))
    logger.warning("skipped %d items (%s); listed in %s", len(rows), counts, target)

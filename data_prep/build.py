"""Config -> dataset and prompts: the one place that puts the parts of this package together."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.config import Cache, DataConfig, OnBad, SourceConfig, Split, validate
from data_prep.conversation import BadItem, Conversation
from data_prep.dataset.dataset import ConversationDataset, StoredDataset, skip_path, weights_of
from data_prep.dataset.prepare import SKIPPED, content_hash, prepare_examples, prepare_index
from data_prep.dataset.skip_log import SkipList, read_skipped, reasons
from data_prep.dataset.stream import StreamDataset
from data_prep.files import default_cache_dir
from data_prep.sources import open_source, open_stream
from data_prep.sources.base import Source, Stream, as_prompt, group, in_split
from sage.inputs.processing import Processor

logger = logging.getLogger(__name__)


def build_dataset(config: DataConfig, processor: Processor, split: str = "train") -> Any:
    """Examples of a split, prepared once and kept in the cache folder.

    Args:
        processor: the target's.
        split: `train`, `validation` or `test`.

    Returns:
        A dataset for `StepLoader`.

    Raises:
        ValueError: a setting or a file is wrong.
        BadItem: a broken item, where `data.on_bad` is `error`.
    """
    validate(config)
    part = Split(split)
    if any(source.streaming for source in config.resolved(part).values()):
        return _build_stream(config, processor, part)
    sources = open_sources(config, part)
    index = prepare_index(config, sources, part)
    listings = [index.folder / SKIPPED]
    weights = weights_of(config) if part is Split.train else None
    dataset: Any
    if config.cache is Cache.examples:
        store = prepare_examples(config, sources, index, processor)
        listings.append(store.folder.parent / SKIPPED)
        dataset = StoredDataset(store, weights, store.folder.parent.name)
    else:
        dataset = ConversationDataset(config, sources, index, processor, weights)
    _report_skipped(listings, skip_path(config, index))
    return dataset


def prompts(config: DataConfig, split: str = "validation", num_prompts: int = 8) -> list[Conversation]:
    """Held-out questions: messages up to before the last answer, which stays in `meta["answer"]`.

    Sources take turns, so a few prompts already show all of them.

    Raises:
        ValueError: a setting or a file is wrong, or there are none.
    """
    validate(config)
    part = Split(split)
    listing = Path(config.bad_list) if config.bad_list else default_cache_dir(config.cache_dir) / "prompts" / SKIPPED
    skipped = SkipList(listing, strict=config.on_bad is OnBad.error)
    streams = [_prompts_of(config, label, source, part, skipped) for label, source in config.resolved(part).items()]
    found: list[Conversation] = []
    while streams and len(found) < num_prompts:
        for stream in list(streams):
            conversation = next(stream, None)
            if conversation is None:
                streams.remove(stream)
            elif len(found) < num_prompts:
                found.append(conversation)
    if skipped.items:
        logger.warning("skipped %d prompts; listed in %s", len(skipped.items), listing)
    if not found:
        raise ValueError(f"data.validation: no prompt for split {part}; name prompt sources or raise data.holdout")
    return found


def open_sources(config: DataConfig, split: Split) -> list[Source]:
    """The sources that serve a split, in the order of the config."""
    return [open_source(label, source, split, config.cache_dir) for label, source in config.resolved(split).items()]


def _build_stream(config: DataConfig, processor: Processor, split: Split) -> StreamDataset:
    streams = [open_stream(label, source, split) for label, source in config.resolved(split).items()]
    listing = default_cache_dir(config.cache_dir) / "streams" / content_hash([s.fingerprint() for s in streams])
    return StreamDataset(config, streams, processor, Path(config.bad_list or listing / SKIPPED))


def _prompts_of(
    config: DataConfig, label: str, source_config: SourceConfig, split: Split, skipped: SkipList
) -> Iterator[Conversation]:
    """A source's prompts of a split, opened at once (so that mistakes show) and read as they are asked for."""
    holdout = 0.0 if config.validation else config.holdout
    if source_config.streaming:
        stream = open_stream(label, source_config, split)
        _refuse_leak(config, label, has_splits=False)
        return _streamed(stream, split, holdout, skipped)
    source = open_source(label, source_config, split, config.cache_dir)
    _refuse_leak(config, label, source.has_splits)
    return _indexed(source, split, holdout, skipped)


def _refuse_leak(config: DataConfig, label: str, has_splits: bool) -> None:
    """What is trained on is no prompt to measure with."""
    if not (config.validation or config.holdout or has_splits):
        raise ValueError(
            f"data.holdout: 0.0; it keeps nothing of {label} out of training to measure on; allowed: above 0, or name prompts "
            f"(+data/validation=NAME, data.validation)"
        )


def _indexed(source: Source, split: Split, holdout: float, skipped: SkipList) -> Iterator[Conversation]:
    for row in range(len(source)):
        try:
            found = source.prompt(row)
        except BadItem as error:
            skipped.add(error)
            continue
        if source.belongs(found, split, holdout):
            yield found


def _streamed(stream: Stream, split: Split, holdout: float, skipped: SkipList) -> Iterator[Conversation]:
    for item in stream.iterate(0):
        try:
            if isinstance(item, BadItem):
                raise item
            found = as_prompt(item)
        except BadItem as error:
            skipped.add(error)
            continue
        if in_split(group(found), split, holdout):
            yield found


def _report_skipped(listings: list[Path], target: Path) -> None:
    rows = [row for listing in listings for row in read_skipped(listing)]
    if not rows:
        return
    listed = SkipList(target, strict=False)
    for row in rows:
        if target not in listings:
            listed.add(BadItem(row["source"], row["index"], row["reason"]))
    counts = ", ".join(f"{count} x {reason}" for reason, count in reasons(rows).most_common(5))
    logger.warning("skipped %d items (%s); listed in %s", len(rows), counts, target)

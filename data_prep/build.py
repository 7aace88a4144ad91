"""Builds datasets and prompts from a `DataConfig`: the entry points that connect the rooms of this package.

All raise ValueError for a setting, a file or a folder that is wrong, and BadItem for an invalid item where `data.on_bad` is
`error`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from data_prep.cache import cache_dir
from data_prep.chat import Lengths
from data_prep.config import Cache, DataConfig, OnBad, validate
from data_prep.conversation import BadItem, Conversation
from data_prep.dataset.dataset import ConversationDataset, StreamDataset, is_stream, skip_path
from data_prep.dataset.index import SKIPPED, SkipLog, count_reasons, prepare_index, read_skipped
from data_prep.dataset.lengths import LongExamples, find_long
from data_prep.dataset.order import alternate
from data_prep.dataset.prepare import prepare_examples
from data_prep.sources.base import Shares, Source, Split, as_prompt, open_source, with_validation_prompts
from sage.inputs.processing import Processor
from sage.io.files import json_digest

logger = logging.getLogger(__name__)
NUM_LOGGED_REASONS = 5


def build_dataset(config: DataConfig, processor: Processor, split: str = "train", logs_skipped: bool = True) -> Any:
    """Returns the cached dataset of a split, `train`, `validation` or `test`, for `StepLoader`.

    From here on the processor renders prompts with `data.thinking`. Skipped items are listed, and with `logs_skipped` logged.
    """
    validate(config)
    processor.thinking = config.thinking.flag
    part = Split(split)
    sources = open_sources(config, part)
    if config.is_streamed(part):
        folder = cache_dir(config.cache_dir) / "streams" / json_digest([stream.fingerprint() for stream in sources])
        return StreamDataset(config, sources, processor, Path(config.bad_list or folder / SKIPPED))
    index = prepare_index(config, sources, part)
    skip_logs = [index.folder / SKIPPED]
    weights = config.source_weights() if part is Split.train else None
    dataset: Any
    if config.cache is Cache.examples:
        dataset = prepare_examples(config, index, processor, weights)
        skip_logs.append(dataset.folder / SKIPPED)
    else:
        dataset = ConversationDataset(config, index, processor, weights)
    _report_skipped(skip_logs, skip_path(config, index), logs_skipped)
    return dataset


def check_rows(config: DataConfig, split: str = "train") -> None:
    """Validates every row of a split, which needs no target, for the cache; ValueError without a valid one. Streams pass."""
    validate(config)
    part = Split(split)
    if not config.is_streamed(part):
        prepare_index(config, open_sources(config, part), part)


def long_examples(config: DataConfig, dataset: Any) -> LongExamples | None:
    """Returns the examples that exceed `data.max_length`, None for a stream; ValueError if all of them would be dropped."""
    if is_stream(dataset):
        return None
    long = find_long(config, [Lengths(*row) for row in dataset.full_lengths().tolist()])
    long.check()
    return long


def prompts(config: DataConfig, split: str = "validation", num_prompts: int = 8) -> list[Conversation]:
    """Returns held-out prompts: the messages before the last answer, which goes to `meta["answer"]`.

    Prompts alternate between the sources, so that a few of them represent all sources. Without any, ValueError.
    """
    validate(config)
    part = Split(split)
    listing = Path(config.bad_list) if config.bad_list else cache_dir(config.cache_dir) / "prompts" / SKIPPED
    skipped = SkipLog(listing, is_strict=config.on_bad is OnBad.error)
    chosen = list(islice(alternate(_prompt_readers(config, part, skipped)), num_prompts))
    if skipped.items:
        logger.warning("skipped %d prompts; listed in %s", len(skipped.items), listing)
    if chosen:
        return chosen
    if config.validation or not config.is_streamed(part):
        raise ValueError(f"data.validation: no prompt for split {part}; name prompt sources or raise data.holdout")
    raise ValueError(
        f"data.holdout: {config.holdout}; holds out no item of {', '.join(config.resolved(part))} for {part}; raise it, or "
        "give prompt sources (+data/validation=NAME)"
    )


def open_sources(config: DataConfig, split: Split) -> list[Any]:
    """Opens the sources (or streams) of a split, in the order of the config; ValueError also for one without such a split."""
    opened: list[Any] = []
    for label, source in config.resolved(split).items():
        opened.append(open_source(label, source, split, config.cache_dir))
        opened[-1].pixel_limits = config.pixel_limits()
        has_split = opened[-1].has_splits or config.validation or config.test_holdout or not config.holdout
        if split is Split.test and not has_split:
            raise ValueError(f"data.test_holdout: 0.0; source {label} has no test split; give it a share, e.g. 0.1")
    return opened


def _prompt_readers(config: DataConfig, split: Split, skipped: SkipLog) -> list[Iterator[Conversation]]:
    """Opens all sources immediately, so that mistakes are found, and returns an iterator over the prompts of each."""
    sources = open_sources(config, split)
    for label, source in zip(config.resolved(split), sources, strict=True):
        if not (config.validation or config.holdout or source.has_splits):  # they would be training items
            raise ValueError(
                f"data.holdout: 0.0; holds out no item of source {label} for validation; allowed: above 0, or prompt sources "
                f"(+data/validation=NAME, data.validation)"
            )
    shares = config.shares if config.is_streamed(split) else with_validation_prompts(config.shares, sources)
    return [_prompts(source, split, shares, skipped) for source in sources]


def _prompts(source: Source, split: Split, shares: Shares, skipped: SkipLog) -> Iterator[Conversation]:
    for item in source.iterate(0):
        try:
            prompt = as_prompt(item)
        except BadItem as error:
            skipped.add(error)
            continue
        if source.belongs_to(prompt, split, shares):
            yield prompt


def _report_skipped(skip_logs: list[Path], target: Path, logs_skipped: bool) -> None:
    """Lists the skipped items in `target`, and logs the invalid ones by reason; for the others see `long_examples`."""
    rows = [row for path in skip_logs for row in read_skipped(path)]
    listed = SkipLog(target, is_strict=False)
    for row in rows if target not in skip_logs else ():
        listed.write(row)
    invalid = [row for row in rows if row["kind"] == BadItem.kind]
    if invalid and logs_skipped:
        counts = ", ".join(f"{count} x {reason}" for reason, count in count_reasons(invalid).most_common(NUM_LOGGED_REASONS))
        logger.warning("skipped %d invalid items (%s); listed in %s", len(invalid), counts, target)

"""The actions of `sage-data` as functions: check, convert, regenerate.

All raise ValueError for a setting, a file or an item that is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.build import build_dataset
from data_prep.chat import Example, encode_example, example_lengths, shorten_example
from data_prep.config import Cache, DataConfig, OnBad, RegenerateConfig
from data_prep.conversation import BadItem, BadTemplate, Conversation, Message, check_conversation
from data_prep.dataset.dataset import ConversationDataset, StreamDataset
from data_prep.dataset.index import REMEDY, count_reasons, unique_rows
from data_prep.dataset.lengths import LongExamples
from data_prep.dataset.order import sample
from data_prep.dialog import own_answers
from data_prep.own_answers import OwnShare, measure_own
from data_prep.server.answers import ServerAnswers
from data_prep.server.client import MediaPolicy
from data_prep.sources.base import Source, Split
from data_prep.sources.rows import JsonRows, RowSource
from data_prep.tools.regenerate import (
    RegenerationResult,
    answerable_items,
    as_line,
    finished_provenance,
    origin_of,
    provenance_of,
    regenerate,
)
from data_prep.tools.stats import Statistics, measure, render_html
from sage.commands.cli import EXIT_USER
from sage.inputs.processing import Processor
from sage.io.files import writing
from sage.io.progress import progress_bar

Data = ConversationDataset | StreamDataset
NUM_ROWS_SHOWN, MAX_SHOWN = 3, 60  # rows of a source, and characters of each message
MAX_INVALID_SHOWN = 50  # invalid items named in an error; the others are listed


def check_data(config: DataConfig, processor: Processor, split: str, limit: int) -> tuple[Statistics, Data]:
    """Prepares a split and measures up to `limit` of its examples (0: all): a sample, or the beginning of a stream.

    All rows are checked, and the images of the measured examples and of the held-out ones, before InvalidItems reports all
    invalid ones where `data.on_bad` is `error`. Of a stream, BadItem reports the first one.
    """
    dataset = (_dataset if config.is_streamed() else _lenient_dataset)(config, processor, split)
    conversations, count = _conversations(dataset, split, limit)
    total = None if isinstance(dataset, StreamDataset) else len(dataset)
    long = LongExamples(total, config.max_length, config.on_long)
    is_strict = config.on_bad is OnBad.error
    measured = _examples(dataset, progress_bar(conversations, "measuring", count), long, is_strict)
    statistics = measure(measured, total, processor)
    statistics.long = long
    invalid = _invalid(dataset)
    if isinstance(dataset, ConversationDataset):
        statistics.total = len(dataset) - sum(item.kind == BadItem.kind for item in dataset.skipped.items)
        invalid = unique_rows(invalid + _held_out_invalid(config, dataset, split, limit))
        if invalid and is_strict:
            note = "" if count == len(dataset) else f" (images of {count} items opened; limit=0 opens all)"
            raise _invalid_items(invalid, dataset.index.sources, dataset.skipped.path, note)
    statistics.skipped = count_reasons(invalid)
    long.check()
    if not statistics.num_measured:
        raise ValueError(f"data.sources: not one of {count or 'all'} items became an example; see {dataset.skipped.path}")
    return statistics, dataset


def _lenient_dataset(config: DataConfig, processor: Processor, split: str) -> Data:
    """Builds a dataset that skips invalid items, to find all; without a valid one, raises the error of the first."""
    try:
        return _dataset(replace(config, on_bad=OnBad.skip), processor, split, logs_skipped=False)
    except ValueError:
        return _dataset(config, processor, split)


def _invalid(dataset: Data) -> list[dict[str, str]]:
    return [row for row in dataset.skipped_items() if row["kind"] == BadItem.kind]


def _held_out_invalid(config: DataConfig, dataset: ConversationDataset, split: str, limit: int) -> list[dict[str, str]]:
    """Returns the invalid items among the prompts that a training split holds out, whose images a run opens as well."""
    if split != Split.train or config.validation or any(source.has_splits for source in dataset.index.sources):
        return []
    try:
        held_out = _lenient_dataset(config, dataset.processor, Split.validation)
    except ValueError:  # nothing is held out
        return []
    for _ in _examples(held_out, _conversations(held_out, Split.validation, limit)[0]):
        pass
    return _invalid(held_out)


class InvalidItems(BadItem):
    """Several invalid items. The message names the first one, `details` all of them on lines of their own."""

    exit_code = EXIT_USER
    details = ""


def _invalid_items(rows: list[dict[str, str]], sources: list[Source], listing: Path, note: str) -> InvalidItems:
    """Returns the error for at least one listed row, with the lines of the items: `2 (id 7), line 3`."""
    for path, source in {Path(source.name): source for source in sources}.items():
        if isinstance(source, RowSource) and isinstance(source.rows, JsonRows):
            numbers = [row["index"].split()[0] if Path(row["source"]) == path else "" for row in rows]
            lines = source.rows.line_numbers([int(number) for number in numbers if number.isdigit()])
            for row, number in zip(rows, numbers, strict=True):
                row["index"] += f", line {lines[int(number)]}" if number.isdigit() else ""
    shown = [f"{row['source']}: item {row['index']}: {row['reason']}\n" for row in rows[:MAX_INVALID_SHOWN]]
    if len(rows) > len(shown):
        shown.append(f"and {len(rows) - len(shown)} more, listed in {listing}\n")
    total = sum(map(len, sources))
    count = f"; {len(rows)} of {total} items are invalid, all of them listed above" if len(rows) > 1 else ""
    error = InvalidItems(rows[0]["source"], rows[0]["index"], f"{rows[0]['reason']}{count}{note}{REMEDY}")
    error.details = "".join(shown) if len(rows) > 1 else ""
    return error


def described(dataset: Data) -> Iterator[str]:
    """Yields what was recognized of every source, with the first rows of it, as lines of text."""
    if isinstance(dataset, StreamDataset):
        return
    for number, source in enumerate(dataset.index.sources):
        yield source.description()
        positions = np.flatnonzero(dataset.index.source == number)[:NUM_ROWS_SHOWN]
        for position in positions.tolist():
            messages = check_conversation(dataset.conversation(position)).messages
            yield f"  row {dataset.index.row[position]}: " + " | ".join(map(_short, messages))


def _short(message: Message) -> str:
    parts = (part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in message["content"])
    return f"{message['role']}: {' '.join(' '.join(parts).split())[:MAX_SHOWN]}"


def measure_own_answers(dataset: Data, target: Any, split: str, count: int) -> OwnShare:
    """Returns the share of own answers in a sample of `count` examples, or in the first ones of a stream."""
    conversations, number = _conversations(dataset, split, count)
    examples = _examples(dataset, progress_bar(conversations, "comparing with the target", number))
    return measure_own(target, ((conversation.source, example) for conversation, example in examples))


def write_report(out: Path, title: str, statistics: Statistics, dataset: Data, split: str, num_shown: int) -> None:
    """Writes the HTML report `out` with `num_shown` examples of a split, and `statistics.as_json()` beside it."""
    conversations, _ = _conversations(dataset, split, num_shown, seed=1)
    shown = list(_examples(dataset, conversations)) if num_shown else []
    page, figures = render_html(title, statistics, shown, dataset.processor), json.dumps(statistics.as_json(), indent=2) + "\n"
    for path, text in ((out, page), (out.with_suffix(".json"), figures)):
        with writing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


# -- convert and regenerate ----------------------------------------------------------------------------------------------


def convert(config: DataConfig, processor: Processor, split: str, out: Path) -> int:
    """Writes a split as `messages` rows to `out`, which may not exist, with its embedded images beside it; returns their
    number.
    """
    if out.exists():
        raise ValueError(f"{out}: exists already; give another out, or delete it")
    dataset = _dataset(config, processor, split)
    conversations, count = _conversations(dataset, split, 0)
    num_written = 0
    with writing(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        for conversation in progress_bar(conversations, "converting", count):
            try:
                file.write(as_line(check_conversation(conversation), out) + "\n")
                num_written += 1
            except BadItem as error:
                dataset.skipped.add(error)
    return num_written


def regenerate_data(
    config: DataConfig,
    target: Any,
    draft: Any,
    settings: RegenerateConfig,
    split: str,
    out: Path,
    rank: int = 0,
    world_size: int = 1,
    key: str = "",
) -> RegenerationResult:
    """Replaces a split's answers by the target's own, in an `out` without rows of other settings (data_prep.tools.regenerate).

    Args:
        target: a loaded target; with `settings.server`, what every server has to serve (`ServedTarget`).
        draft: for speculative decoding without a server; None: none.
        key: of the servers, empty if they have none.
    """
    if not settings.server:
        dataset = answerable_items(config, target.processor, split)
        drive = own_answers(target, draft, settings, config.num_frames, len(dataset) // world_size)
        provenance = provenance_of(dataset, origin_of(target, settings), settings)
        return regenerate(dataset, drive, out, provenance, settings, rank, world_size)
    finished = finished_provenance(out)
    with ServerAnswers(settings, key, target, MediaPolicy.of(config, Split(split), settings.images)) as servers:
        model = servers.check() if finished is None else finished.get("served_model")
        dataset = answerable_items(config, target.processor, split)
        provenance = provenance_of(dataset, origin_of(target, settings, model), settings)
        return regenerate(dataset, servers.drive, out, provenance, settings, rank, world_size)


# -- examples of a dataset -----------------------------------------------------------------------------------------------


def _dataset(config: DataConfig, processor: Processor, split: str, logs_skipped: bool = True) -> Data:
    """Builds a dataset that provides its conversations; cached examples do not."""
    dataset: Data = build_dataset(replace(config, cache=Cache.rows), processor, split, logs_skipped)
    return dataset


def _conversations(dataset: Data, split: str, count: int, seed: int = 0) -> tuple[Iterator[Conversation], int | None]:
    """Returns up to `count` (0: all) conversations and their number: a sample in order, or the beginning of a stream."""
    if isinstance(dataset, StreamDataset):
        return islice(dataset.one_pass(Split(split)), count or None), count or None
    positions = sample(len(dataset), count, seed)
    return (dataset.conversation(position) for position in positions), len(positions)


def _examples(
    dataset: Data, conversations: Iterator[Conversation], long: LongExamples | None = None, is_strict: bool = False
) -> Iterator[tuple[Conversation, Example]]:
    """Yields conversations with their examples; invalid ones are listed or raised, as set by `data.on_bad`. `long` counts.

    With `is_strict`, a fault of the chat template, which all items share, is raised at once.
    """
    config = dataset.config
    for conversation in conversations:
        try:
            example = encode_example(conversation, dataset.processor, config.num_frames)
            if long is not None:
                long.add(example_lengths(example))
            limits = (config.max_length, config.on_long, config.num_frames)
            yield check_conversation(conversation), shorten_example(conversation, example, dataset.processor, *limits)
        except BadItem as error:
            if is_strict and isinstance(error, BadTemplate):
                raise
            dataset.skipped.add(error)

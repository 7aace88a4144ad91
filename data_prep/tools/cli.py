"""The actions of `sage-data` as functions: check, convert, regenerate.

All raise ValueError for a setting, a file or an item that is wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from data_prep.build import build_dataset
from data_prep.chat import Example, encode_example, example_lengths, shorten_example
from data_prep.config import Cache, DataConfig, RegenerateConfig
from data_prep.conversation import BadItem, Conversation, check_conversation
from data_prep.dataset.dataset import ConversationDataset
from data_prep.dataset.lengths import LongExamples
from data_prep.dataset.mixing import sample
from data_prep.dataset.skip_log import count_reasons
from data_prep.dataset.stream import StreamDataset
from data_prep.dialog import one_by_one
from data_prep.server.answers import ServerAnswers
from data_prep.server.chat_request import MediaPolicy
from data_prep.server.check import ServedTarget
from data_prep.splits import Split
from data_prep.tools.html_report import render_html
from data_prep.tools.jsonl_writer import MediaFolder, as_line
from data_prep.tools.regenerate import RegenerationResult, answerer, finished_provenance, regenerate
from data_prep.tools.stats import Statistics, measure
from sage.drafts.location import find_draft
from sage.inputs.processing import Processor
from sage.io.files import writing
from sage.io.progress import progress_bar

Data = ConversationDataset | StreamDataset


def check_data(config: DataConfig, processor: Processor, split: str, limit: int) -> tuple[Statistics, Data]:
    """Prepares a split and measures up to `limit` of its examples (0: all): a sample, or the beginning of a stream."""
    dataset = _dataset(config, processor, split)
    conversations, count = _conversations(dataset, split, limit)
    total = None if isinstance(dataset, StreamDataset) else len(dataset)
    long = LongExamples(total, config.max_length, config.on_long)
    statistics = measure(_examples(dataset, progress_bar(conversations, "measuring", count), long), total, processor)
    statistics.long = long
    statistics.skipped = count_reasons([row for row in dataset.skipped_items() if row["kind"] == BadItem.kind])
    long.check()
    if not statistics.num_measured:
        raise ValueError(f"data.sources: not one of {count or 'all'} items became an example; see {dataset.skipped.path}")
    return statistics, dataset


def write_report(out: Path, title: str, statistics: Statistics, dataset: Data, split: str, num_shown: int) -> None:
    """Writes the HTML report `out` with `num_shown` examples of a split, and `statistics.as_json()` beside it."""
    conversations, _ = _conversations(dataset, split, num_shown, seed=1)
    shown = list(_examples(dataset, conversations)) if num_shown else []
    for path, text in (
        (out, render_html(title, statistics, shown, dataset.processor)),
        (out.with_suffix(".json"), json.dumps(statistics.as_json(), indent=2) + "\n"),
    ):
        with writing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def convert(config: DataConfig, processor: Processor, split: str, out: Path) -> int:
    """Writes a split as `messages` rows to `out`, which may not exist, with its embedded images beside it; returns their
    number.
    """
    if out.exists():
        raise ValueError(f"{out}: exists already; give another out, or delete it")
    dataset = _dataset(config, processor, split)
    conversations, count = _conversations(dataset, split, 0)
    media, num_written = MediaFolder(out), 0
    with writing(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        for conversation in progress_bar(conversations, "converting", count):
            try:
                file.write(as_line(check_conversation(conversation), media) + "\n")
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
) -> RegenerationResult:
    """Replaces a split's answers by the target's own, in an `out` without rows of other settings; see
    data_prep.tools.regenerate.
    """
    dataset = _items(config, target.processor, split)
    origin = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "draft": _digest(find_draft(settings.draft)) if settings.draft else None,
        "policy": settings.policy,
        "dtype": str(target.dtype),
    }
    drive = one_by_one(answerer(target, draft, settings, config.num_frames))
    return regenerate(dataset, drive, out, _provenance(dataset, origin, settings), settings.seed, rank, world_size)


def regenerate_from_server(
    config: DataConfig,
    target: ServedTarget,
    key: str,
    settings: RegenerateConfig,
    split: str,
    out: Path,
    rank: int = 0,
    world_size: int = 1,
) -> RegenerationResult:
    """`regenerate_data` with the answers of `settings.server`, each of which has to answer and to serve the target."""
    policy = MediaPolicy.of(config, Split(split), settings.images)
    finished = finished_provenance(out)
    with ServerAnswers(settings, key, target, policy) as servers:
        model = servers.check() if finished is None else finished.get("served_model")
        dataset = _items(config, target.processor, split)
        origin = {
            "target": target.name,
            "target_fingerprint": target.fingerprint,
            "draft": None,
            "served_model": model,
        }
        provenance = _provenance(dataset, origin, settings)
        return regenerate(dataset, servers.drive, out, provenance, settings.seed, rank, world_size)


def _items(config: DataConfig, processor: Processor, split: str) -> Data:
    if any(source.streaming for source in config.sources.values()):
        raise ValueError(
            "data.sources: a stream has no fixed items to answer and resume; write a part of it first (action=convert "
            "data.num_examples=N out=PART.jsonl), then answer that (action=regenerate data=messages data.path=PART.jsonl)"
        )
    return _dataset(config, processor, split)


def _provenance(dataset: Data, origin: dict[str, Any], settings: RegenerateConfig) -> dict[str, Any]:
    """Returns the origin of the rows: target, engine, data and decoding settings."""
    data = {"data": dataset.fingerprint, "num_frames": dataset.config.num_frames}
    return {**origin, **data, **settings.sampling()}


def _dataset(config: DataConfig, processor: Processor, split: str) -> Data:
    """Builds a dataset that provides its conversations; cached examples do not."""
    dataset: Data = build_dataset(replace(config, cache=Cache.rows), processor, split)
    return dataset


def _conversations(dataset: Data, split: str, count: int, seed: int = 0) -> tuple[Iterator[Conversation], int | None]:
    """Returns up to `count` (0: all) conversations and their number: a sample in order, or the beginning of a stream."""
    if isinstance(dataset, StreamDataset):
        return islice(dataset.one_pass(Split(split)), count or None), count or None
    positions = sample(len(dataset), count, seed)
    return (dataset.conversation(position) for position in positions), len(positions)


def _examples(
    dataset: Data, conversations: Iterator[Conversation], long: LongExamples | None = None
) -> Iterator[tuple[Conversation, Example]]:
    """Yields conversations with their examples; invalid ones are listed or raised, as set by `data.on_bad`. `long` counts."""
    config = dataset.config
    for conversation in conversations:
        try:
            example = encode_example(conversation, dataset.processor, config.num_frames)
            if long is not None:
                long.add(example_lengths(example))
            limits = (config.max_length, config.on_long, config.num_frames)
            yield check_conversation(conversation), shorten_example(conversation, example, dataset.processor, *limits)
        except BadItem as error:
            dataset.skipped.add(error)


def _digest(folder: Path) -> str:
    """Returns name and weight hash of a draft folder."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return f"{folder.name}:{digest.hexdigest()[:16]}"

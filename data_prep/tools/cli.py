"""What `sage-data` does: check, look, convert, regenerate. The command line itself is train.cli.data.

Owns: the work and its output on the terminal. Imports no Hydra, so a notebook can call the same functions.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from data_prep.build import build_dataset
from data_prep.chat import Example
from data_prep.config import Cache, DataConfig, RegenerateConfig, Split
from data_prep.conversation import BadItem, Conversation, check
from data_prep.dataset.dataset import ConversationDataset
from data_prep.dataset.skip_log import reasons
from data_prep.dataset.stream import StreamDataset
from data_prep.files import atomic_path
from data_prep.progress import Progress, with_progress
from data_prep.tools.html_report import page
from data_prep.tools.jsonl_writer import MediaFolder, as_line
from data_prep.tools.regenerate import Outcome, answerer, regenerate
from data_prep.tools.stats import Statistics, measure, sample
from sage.inputs.processing import Processor

Data = ConversationDataset | StreamDataset


def check_data(config: DataConfig, processor: Processor, split: str, limit: int) -> tuple[Statistics, Data]:
    """Prepares a split and measures up to `limit` of its examples (0: all): a sample, of a stream the first ones.

    Returns:
        The statistics and the data set.

    Raises:
        ValueError: a setting, a file or an item is wrong.
    """
    dataset = _dataset(config, processor, split)
    conversations, count = _conversations(dataset, split, limit)
    items = _examples(dataset, with_progress(conversations, count, "measuring"))
    total = None if isinstance(dataset, StreamDataset) else len(dataset)
    statistics = measure(items, total, Counter(), processor)
    statistics.skipped = reasons(dataset.skipped_items())
    if not statistics.measured:
        raise ValueError(f"data.sources: not one of {count or 'all'} items became an example; see {dataset.skipped.path}")
    return statistics, dataset


def write_page(out: Path, config: DataConfig, statistics: Statistics, dataset: Data, split: str, num_shown: int) -> None:
    """Writes `out` (HTML) with `num_shown` examples of a split and `statistics.json` beside it."""
    conversations, _ = _conversations(dataset, split, num_shown, seed=1)
    shown = list(_examples(dataset, conversations)) if num_shown else []
    title = f"{config.name} for {dataset.processor.family.model_type}"
    for path, text in (
        (out, page(title, statistics, shown, dataset.processor)),
        (out.with_suffix(".json"), json.dumps(statistics.as_json(), indent=2) + "\n"),
    ):
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def convert(config: DataConfig, processor: Processor, split: str, out: Path) -> int:
    """Writes a split as `messages` rows with its embedded pictures beside them (a stream: one pass); returns how many.

    Raises:
        ValueError: `out` exists, or an item is wrong.
    """
    if out.exists():
        raise ValueError(f"{out}: exists already; give another out, or delete it")
    dataset = _dataset(config, processor, split)
    conversations, count = _conversations(dataset, split, 0)
    media, written = MediaFolder(out), 0
    with atomic_path(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        for conversation in with_progress(conversations, count, "converting"):
            try:
                file.write(as_line(check(conversation), media) + "\n")
                written += 1
            except BadItem as error:
                dataset.skipped.add(error)
    return written


def regenerate_data(
    config: DataConfig,
    target: Any,
    draft: Any,
    settings: RegenerateConfig,
    split: str,
    out: Path,
    rank: int = 0,
    world_size: int = 1,
) -> Outcome:
    """Lets the target answer a split's prompts; see data_prep.tools.regenerate.

    Raises:
        ValueError: a setting or a file is wrong, or `out` holds rows that were made otherwise.
    """
    if any(source.streaming for source in config.sources.values()):
        raise ValueError(
            "data.sources: a stream has no fixed items to answer and resume; write a part of it first (action=convert "
            "data.num_examples=N out=PART.jsonl), then answer that (action=regenerate data=messages data.path=PART.jsonl)"
        )
    dataset = _dataset(config, target.processor, split)
    provenance = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "draft": _digest(Path(settings.draft)) if settings.draft else None,
        "dtype": str(target.dtype),
        "data": dataset.fingerprint,
        "num_frames": config.num_frames,
    }
    ask = answerer(target, draft, settings, config.num_frames)
    progress = Progress("answering")
    try:
        return regenerate(dataset, ask, out, provenance, settings, rank, world_size, progress if rank == 0 else None)
    finally:
        progress.end()


def _dataset(config: DataConfig, processor: Processor, split: str) -> Data:
    """The split with its conversations at hand; ready-made examples would have lost them."""
    dataset: Data = build_dataset(replace(config, cache=Cache.rows), processor, split)
    return dataset


def _conversations(dataset: Data, split: str, count: int, seed: int = 0) -> tuple[Iterator[Conversation], int | None]:
    """Up to `count` (0: all) conversations and how many that will be: a sample in order, or the beginning of a stream."""
    if isinstance(dataset, StreamDataset):
        return islice(dataset.one_pass(Split(split)), count or None), count or None
    numbers = sample(len(dataset), count, seed)
    return (dataset.conversation(number) for number in numbers), len(numbers)


def _examples(dataset: Data, conversations: Iterator[Conversation]) -> Iterator[tuple[Conversation, Example]]:
    """Conversations with their examples; broken ones are listed (or raised) by the data set's own rule."""
    for conversation in conversations:
        try:
            yield check(conversation), dataset.build(conversation)
        except BadItem as error:
            dataset.skipped.add(error)


def _digest(folder: Path) -> str:
    """Name and hash of a draft folder's weights."""
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        found.update(file.read_bytes())
    return f"{folder.name}:{found.hexdigest()[:16]}"

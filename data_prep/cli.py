"""What `sage-data` does: check, look, convert, regenerate. The command line itself is train.data_cli.

Owns: the work and its output on the terminal. Imports no Hydra, so a notebook can call the same functions.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.build import build_dataset
from data_prep.chat import Example
from data_prep.config import Cache, DataConfig, RegenerateConfig
from data_prep.conversation import BadItem, Conversation, check
from data_prep.dataset import ConversationDataset
from data_prep.files import atomic_path
from data_prep.page import page
from data_prep.regenerate import Outcome, answerer, regenerate
from data_prep.rowfile import MediaFolder, as_line
from data_prep.skipped import reasons
from data_prep.stats import Statistics, measure, sample
from sage.targets.processing import Processor


def check_data(config: DataConfig, processor: Processor, split: str, limit: int) -> tuple[Statistics, Any]:
    """Prepares a split and measures up to `limit` of its examples (0: all).

    Returns:
        The statistics and the data set.

    Raises:
        ValueError: a setting, a file or an item is wrong.
    """
    dataset = _rows(config, processor, split)
    numbers = sample(len(dataset), limit)
    items = _with_progress(_examples(dataset, numbers), len(numbers), "measuring")
    statistics = measure(items, len(dataset), Counter(), processor)
    statistics.skipped = reasons(dataset.skipped_items())
    if not statistics.measured:
        raise ValueError(f"data.sources: not one of {len(numbers)} items became an example; see {dataset.skipped.path}")
    return statistics, dataset


def write_page(out: Path, config: DataConfig, statistics: Statistics, dataset: Any, num_shown: int) -> None:
    """Writes `out` (HTML) with `num_shown` examples and `statistics.json` beside it."""
    shown = list(_examples(dataset, sample(len(dataset), num_shown, seed=1)))
    title = f"{config.name} for {dataset.processor.family.model_type}"
    for path, text in (
        (out, page(title, statistics, shown, dataset.processor)),
        (out.with_suffix(".json"), json.dumps(statistics.as_json(), indent=2) + "\n"),
    ):
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def convert(config: DataConfig, processor: Processor, split: str, out: Path) -> int:
    """Writes a split as `messages` rows with its embedded pictures beside them; returns how many.

    Raises:
        ValueError: `out` exists, or an item is wrong.
    """
    if out.exists():
        raise ValueError(f"{out}: exists already; give another out, or delete it")
    dataset = _rows(config, processor, split)
    media = MediaFolder(out)
    with atomic_path(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        for number in _with_progress(iter(range(len(dataset))), len(dataset), "converting"):
            file.write(as_line(check(dataset.conversation(number)), media) + "\n")
    return len(dataset)


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
    """Lets the target answer a split's prompts; see data_prep.regenerate.

    Raises:
        ValueError: a setting or a file is wrong, or `out` holds rows that were made otherwise.
    """
    dataset = _rows(config, target.processor, split)
    provenance = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "draft": _digest(Path(settings.draft)) if settings.draft else None,
        "dtype": str(target.dtype),
        "data": dataset.fingerprint,
        "num_frames": config.num_frames,
    }
    ask = answerer(target, draft, settings, config.num_frames)
    progress = Progress("answering") if rank == 0 else None
    return regenerate(dataset, ask, out, provenance, settings, rank, world_size, progress)


class Progress:
    """A line on the terminal that counts; silent where there is none."""

    def __init__(self, what: str) -> None:
        self.what, self.begin, self.shown = what, time.monotonic(), 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() and (done == total or now - self.shown > 0.2):
            self.shown = now
            left = (now - self.begin) / done * (total - done)
            end = "\n" if done == total else ""
            print(f"\r{self.what} {done}/{total}, {left:.0f} s left ", end=end, file=sys.stderr, flush=True)


def _rows(config: DataConfig, processor: Processor, split: str) -> ConversationDataset:
    """The split with its conversations at hand; ready-made examples would have lost them."""
    if any(source.streaming for source in config.sources.values()):
        raise ValueError("data.sources: a streamed source cannot be looked at; set streaming=false and num_examples")
    dataset = build_dataset(replace(config, cache=Cache.rows), processor, split)
    assert isinstance(dataset, ConversationDataset)
    return dataset


def _examples(dataset: ConversationDataset, numbers: Any) -> Iterator[tuple[Conversation, Example]]:
    """Conversations with their examples; broken ones are listed (or raised) by the data set's own rule."""
    for number in numbers:
        try:
            yield check(dataset.conversation(number)), dataset.example(number)
        except BadItem as error:
            dataset.skipped.add(error)


def _with_progress(items: Iterator[Any], total: int, what: str) -> Iterator[Any]:
    progress = Progress(what)
    for done, item in enumerate(items, 1):
        yield item
        progress(done, total)


def _digest(folder: Path) -> str:
    """Name and hash of a draft folder's weights."""
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        found.update(file.read_bytes())
    return f"{folder.name}:{found.hexdigest()[:16]}"


def load_processor(path: str) -> Processor:
    """A target's tokenizer and image processor without its weights.

    Raises:
        ValueError: no target of a known family there.
    """
    from transformers import AutoConfig

    from sage.targets.target import FAMILIES

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"target: {path}: cannot read its config.json ({str(error).splitlines()[0]})") from error
    for family in FAMILIES:
        if family.model_type == config.model_type:
            return Processor.from_pretrained(path, family(config))
    known = ", ".join(family.model_type for family in FAMILIES)
    raise ValueError(f"target: {path}: model_type {config.model_type!r} is not a known family; known: {known}")

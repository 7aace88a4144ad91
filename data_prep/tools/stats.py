"""Statistics of a dataset: counts, lengths, visual tokens, supervised share, skipped items.

The HTML report is one file: images, tokens colored by whether they are supervised, histograms.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.chat import Example, Fit
from data_prep.conversation import Conversation, media_parts
from data_prep.dataset.lengths import LongExamples
from data_prep.own_answers import OwnShare
from sage.inputs.processing import Processor
from sage.inputs.thumbnails import media_thumbnails
from sage.io.page import render, table
from sage.io.tables import counted, text_table

MEASURES = {
    "tokens": "tokens per example",
    "visual_tokens": "visual tokens per example",
    "answer_tokens": "supervised tokens per example",
    "mask_share": "supervised share of the text",
    "turns": "answers per example",
    "visuals": "images and videos per example",
}
QUANTILES = {"min": 0.0, "5%": 0.05, "median": 0.5, "95%": 0.95, "max": 1.0}
HEAD = ("", *QUANTILES, "mean")
NO_FAMILY = "-"
NOT_MEASURED = "own answers: not measured; the first steps of a run do, and own=64 with the weights of the target here"
JSON_KEYS = ("min", "p05", "median", "p95", "max", "mean")
THUMBNAIL_SIDE = 224  # pixels
NUM_FRAMES = 4  # shown per video
NUM_BINS = 24


@dataclass
class Statistics:
    """Measures of a sample of a dataset."""

    total: int | None  # examples in the dataset; None for a stream
    sources: Counter[str] = field(default_factory=Counter)  # of the measured examples
    families: Counter[str] = field(default_factory=Counter)
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MEASURES})  # one per example
    skipped: Counter[str] = field(default_factory=Counter)  # invalid items by reason
    own: OwnShare | None = None  # the share of tokens that are the target's own choice, if it was measured
    long: LongExamples | None = None  # the examples that exceed `data.max_length`, if they were counted

    @property
    def num_measured(self) -> int:
        return len(self.values["tokens"])

    @property
    def headline(self) -> str:
        if self.total is None:
            return f"a stream, its first {self.num_measured} examples measured"
        return f"{self.total} examples, {self.num_measured} measured"

    @property
    def own_line(self) -> str:
        return self.own.line() if self.own else NOT_MEASURED

    @property
    def own_warning(self) -> str:
        return self.own.warning() if self.own and self.own.is_foreign else ""

    def add(self, conversation: Conversation, example: Example, processor: Processor) -> None:
        visual = processor.family.visual_mask(example["input_ids"])
        answer_tokens = int(example["loss_mask"].sum())
        measured = {
            "tokens": len(visual),
            "visual_tokens": int(visual.sum()),
            "answer_tokens": answer_tokens,
            "mask_share": answer_tokens / int((~visual).sum()),
            "turns": sum(message["role"] == "assistant" for message in conversation.messages),
            "visuals": sum(1 for _ in media_parts(conversation.messages)),
        }
        for name, value in measured.items():
            self.values[name].append(value)
        self.sources[conversation.source] += 1
        self.families[conversation.family or NO_FAMILY] += 1

    def summary(self, name: str) -> list[float]:
        """Returns the quantiles of a measure (`QUANTILES`) and its mean."""
        values = np.array(self.values[name])
        return [*np.quantile(values, list(QUANTILES.values())).tolist(), float(values.mean())]

    def table_rows(self) -> list[list[str]]:
        """Returns one row of formatted cells per measure, in the columns of `HEAD`."""
        return [[label, *map(format_number, self.summary(name))] for name, label in MEASURES.items()]

    def as_json(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "measured": self.num_measured,
            "sources": dict(self.sources),
            "families": dict(self.families),
            "measures": {name: dict(zip(JSON_KEYS, self.summary(name), strict=True)) for name in MEASURES},
            "skipped": dict(self.skipped),
            "own_answers": self.own.as_json() if self.own else None,
            "long": {fit: self.long.counts[fit] for fit in Fit} if self.long else None,
        }

    def as_text(self) -> str:
        lines = [self.headline]
        for title, counts in (("source", self.sources), ("family", self.families)):
            lines += [f"  {title} {name}: {count}" for name, count in counts.most_common() if set(counts) != {NO_FAMILY}]
        lines += ["", text_table(HEAD, self.table_rows(), ruled=False), ""]
        lines += [f"{sum(self.skipped.values())} invalid items skipped"]
        lines += [f"  {count} x {reason}" for reason, count in self.skipped.most_common()]
        lines += [self.long.line()] if self.long else []
        lines += [self.own_line]
        return "\n".join(lines)


def measure(items: Iterable[tuple[Conversation, Example]], total: int | None, processor: Processor) -> Statistics:
    """Measures examples, given with their conversations; `total` is their number in the dataset, None for a stream."""
    statistics = Statistics(total)
    for conversation, example in items:
        statistics.add(conversation, example, processor)
    return statistics


def format_number(value: float) -> str:
    """Formats a number: integers exactly, others with two decimals below 10 and one above."""
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def render_html(title: str, statistics: Statistics, shown: list[tuple[Conversation, Example]], processor: Processor) -> str:
    """Returns the report as HTML (template: report.html), with the examples `shown`."""
    varying = [name for name in MEASURES if len(set(statistics.values[name])) > 1]
    same = [f"{label} {format_number(statistics.values[name][0])}" for name, label in MEASURES.items() if name not in varying]
    counts = {"Sources": statistics.sources, "Families": statistics.families, "Skipped, by reason": statistics.skipped}
    return render(
        Path(__file__).parent / "report.html",
        filters={"without_folders": without_folders},
        title=title,
        statistics=statistics,
        warning=statistics.own_warning,
        constants=same,
        charts=[_histogram(MEASURES[name], statistics.values[name]) for name in varying],
        numbers=table(HEAD, statistics.table_rows()),
        counts={
            name: table([name.lower(), "number"], [[without_folders(key), number] for key, number in count.most_common()])
            for name, count in counts.items()
            if set(count) - {NO_FAMILY}
        },
        examples=[_example(conversation, example, processor) for conversation, example in shown],
    )


def without_folders(text: str) -> str:
    """Returns a text with the folders of absolute paths left out: `/home/me/rows.json` -> `rows.json`."""
    return re.sub(r"(?<![\w.~/])~?/(?:[^\s/'\"()]+/)+(?=[^\s/])", "", text)


def _histogram(label: str, values: list[float]) -> dict[str, Any]:
    """Returns a bar chart of 320 x 130 units: the bars as (x, y, width, height), the range, and the highest count."""
    low, high = min(values), max(values)
    is_integer = all(value == int(value) for value in values)
    bins = int(min(NUM_BINS, high - low + 1)) if is_integer else NUM_BINS
    edges = (low - 0.5, high + 0.5) if is_integer else (low, high if high > low else low + 1e-9)
    counts, _ = np.histogram(values, bins=bins, range=edges)
    width, most = 320 / bins, max(1, int(counts.max()))
    bars = [(i * width + 0.5, 110 - 95 * n / most, width - 1, 95 * n / most) for i, n in enumerate(counts.tolist())]
    return {"label": label, "bars": bars, "low": low, "high": high, "most": counted(most, "example")}


def _example(conversation: Conversation, example: Example, processor: Processor) -> dict[str, Any]:
    visual = processor.family.visual_mask(example["input_ids"])
    facts = {
        "tokens": len(visual),
        "visual": int(visual.sum()),
        "supervised": int(example["loss_mask"].sum()),
        "source": without_folders(conversation.source),
        **({"family": conversation.family} if conversation.family else {}),
    }
    tokens = _tokens(example, visual.tolist(), processor)
    media = list(media_thumbnails(conversation.messages, THUMBNAIL_SIDE, THUMBNAIL_SIDE // 2, NUM_FRAMES, NUM_FRAMES))
    return {"id": conversation.id, "facts": facts, "media": media, "tokens": list(tokens)}


def _tokens(example: Example, visual: list[bool], processor: Processor) -> Iterator[tuple[str, str, int]]:
    """Yields text, style (`v`isual, `y`es: supervised) and number of visual tokens of one span per token; one span for a run of
    visual tokens, and for the bytes of one character.
    """
    ids, mask = example["input_ids"].tolist(), example["loss_mask"].tolist()
    image_id = processor.family.slots.get("image")
    position = 0
    while position < len(ids):
        end = position + 1
        if visual[position]:
            while end < len(ids) and ids[end] == ids[position]:
                end += 1
            yield "image" if ids[position] == image_id else "video", "v", end - position
        else:
            text = processor.tokenizer.decode(ids[position:end])
            while "\ufffd" in text and end < min(len(ids), position + 4):
                end += 1
                text = processor.tokenizer.decode(ids[position:end])
            yield text, "y" if mask[position] else "", 0
        position = end

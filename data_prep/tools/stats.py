"""Statistics of a dataset: counts, lengths, visual tokens, supervised share, skipped items.

Owns: the measures of an example and their aggregation. Does not own: the HTML report (data_prep.tools.html_report).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_prep.chat import Example, Fit
from data_prep.conversation import Conversation, media_parts
from data_prep.dataset.lengths import LongExamples
from data_prep.own_answers import OwnShare
from sage.inputs.processing import Processor
from sage.io.tables import text_table

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


@dataclass
class Statistics:
    """Measures of a sample of a dataset.

    Attributes:
        total: examples in the dataset; None for a stream.
        sources, families: measured examples by source and by task family.
        values: one value per measured example, by measure (a key of `MEASURES`).
        skipped: invalid items by reason.
        own: the share of tokens that are the target's own choice, if it was measured.
        long: the examples that exceed `data.max_length`, if they were counted.
    """

    total: int | None
    sources: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MEASURES})
    skipped: Counter[str] = field(default_factory=Counter)
    own: OwnShare | None = None
    long: LongExamples | None = None

    @property
    def num_measured(self) -> int:
        return len(self.values["tokens"])

    @property
    def headline(self) -> str:
        """The number of examples in total and measured."""
        if self.total is None:
            return f"a stream, its first {self.num_measured} examples measured"
        return f"{self.total} examples, {self.num_measured} measured"

    @property
    def own_line(self) -> str:
        """The share of own answers, or how it is measured."""
        return self.own.line() if self.own else NOT_MEASURED

    def add(self, conversation: Conversation, example: Example, processor: Processor) -> None:
        """Measures one example."""
        visual = processor.family.visual_mask(example["input_ids"])
        answer_tokens = int(example["loss_mask"].sum())
        found = {
            "tokens": len(visual),
            "visual_tokens": int(visual.sum()),
            "answer_tokens": answer_tokens,
            "mask_share": answer_tokens / int((~visual).sum()),
            "turns": sum(message["role"] == "assistant" for message in conversation.messages),
            "visuals": sum(1 for _ in media_parts(conversation.messages)),
        }
        for name, value in found.items():
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
        """Returns the content of `statistics.json`."""
        return {
            "total": self.total,
            "measured": self.num_measured,
            "sources": dict(self.sources),
            "families": dict(self.families),
            "measures": {name: dict(zip(JSON_KEYS, self.summary(name), strict=True)) for name in MEASURES},
            "skipped": dict(self.skipped),
            "own_answers": {"share": self.own.share, "tokens": self.own.num_tokens} if self.own else None,
            "long": {fit: self.long.counts[fit] for fit in Fit} if self.long else None,
        }

    def as_text(self) -> str:
        """Returns the statistics as text for a terminal."""
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

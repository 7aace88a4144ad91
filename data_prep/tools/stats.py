"""Statistics of a dataset: counts, lengths, visual tokens, supervised share, skipped items.

Owns: the measures of an example and their aggregation. Does not own: the HTML report (data_prep.tools.html_report).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_prep.chat import Example
from data_prep.conversation import Conversation, media_parts
from data_prep.dataset.mixing import permutation
from sage.bench.tables import text_table
from sage.inputs.processing import Processor

MEASURES = {
    "tokens": "tokens per example",
    "visual_tokens": "visual tokens per example",
    "answer_tokens": "supervised tokens per example",
    "mask_share": "supervised share of the text",
    "turns": "answers per example",
    "pictures": "images and videos per example",
}
QUANTILES = {"min": 0.0, "5%": 0.05, "median": 0.5, "95%": 0.95, "max": 1.0}
HEAD = ("", *QUANTILES, "mean")
JSON_KEYS = ("min", "p05", "median", "p95", "max", "mean")


@dataclass
class Statistics:
    """Measures of a sample of a dataset.

    Attributes:
        total: examples in the dataset; None for a stream.
        sources, families: measured examples by source and by task family.
        values: one value per measured example, by measure (a key of `MEASURES`).
        skipped: skipped items by reason.
    """

    total: int | None
    sources: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MEASURES})
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def num_measured(self) -> int:
        return len(self.values["tokens"])

    @property
    def headline(self) -> str:
        """The number of examples in total and measured."""
        if self.total is None:
            return f"a stream, its first {self.num_measured} examples measured"
        return f"{self.total} examples, {self.num_measured} measured"

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
            "pictures": sum(1 for _ in media_parts(conversation.messages)),
        }
        for name, value in found.items():
            self.values[name].append(value)
        self.sources[conversation.source] += 1
        self.families[conversation.family or "-"] += 1

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
        }

    def as_text(self) -> str:
        """Returns the statistics as text for a terminal."""
        lines = [self.headline]
        for title, counts in (("source", self.sources), ("family", self.families)):
            lines += [f"  {title} {name}: {count}" for name, count in counts.most_common()]
        lines += ["", text_table(HEAD, self.table_rows(), ruled=False), ""]
        lines += [f"{sum(self.skipped.values())} items skipped"]
        lines += [f"  {count} x {reason}" for reason, count in self.skipped.most_common()]
        return "\n".join(lines)


def sample(total: int, count: int, seed: int = 0) -> Sequence[int]:
    """Returns `count` positions out of `total` in increasing order; all of them if there are no more, or with count 0."""
    if not count or count >= total:
        return range(total)
    return sorted(permutation(total, seed, "sample")[:count].tolist())


def measure(items: Iterable[tuple[Conversation, Example]], total: int | None, processor: Processor) -> Statistics:
    """Measures examples, given with their conversations; `total` is their number in the dataset, None for a stream."""
    statistics = Statistics(total)
    for conversation, example in items:
        statistics.add(conversation, example, processor)
    return statistics


def format_number(value: float) -> str:
    """Formats a number: integers exactly, others with two decimals below 10 and one above."""
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}" if value < 10 else f"{value:.1f}"

"""What the data is like: counts, lengths, visual tokens, mask share, what was skipped and why.

Owns: measuring examples and adding them up. Does not own: showing them (data_prep.tools.html_report, data_prep.tools.cli).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_prep.chat import Example, visual_mask
from data_prep.conversation import Conversation, media_parts
from data_prep.dataset.mixing import permutation
from sage.inputs.processing import Processor

MEASURES = {
    "tokens": "tokens per example",
    "visual_tokens": "visual tokens per example",
    "answer_tokens": "supervised tokens per example",
    "mask_share": "supervised share of the text",
    "turns": "answers per example",
    "pictures": "pictures and clips per example",
}
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)


@dataclass
class Statistics:
    """Measures of some examples of a data set.

    Attributes:
        total: examples in the data set, None for a stream; `measured` of them were looked at.
        sources, families: examples by source and by task family.
        values: one value per measured example, by measure (see MEASURES).
        skipped: left-out items by kind of reason.
    """

    total: int | None
    sources: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MEASURES})
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def measured(self) -> int:
        return len(self.values["tokens"])

    @property
    def headline(self) -> str:
        """How many there are, and how many were looked at."""
        if self.total is None:
            return f"a stream, its first {self.measured} examples measured"
        return f"{self.total} examples, {self.measured} measured"

    def add(self, conversation: Conversation, example: Example, processor: Processor) -> None:
        """Measures one example."""
        visual = visual_mask(example, processor)
        answer = int(example["loss_mask"].sum())
        found = {
            "tokens": len(visual),
            "visual_tokens": int(visual.sum()),
            "answer_tokens": answer,
            "mask_share": answer / int((~visual).sum()),
            "turns": sum(message["role"] == "assistant" for message in conversation.messages),
            "pictures": sum(1 for _ in media_parts(conversation.messages)),
        }
        for name, value in found.items():
            self.values[name].append(value)
        self.sources[conversation.source] += 1
        self.families[conversation.family or "-"] += 1

    def quantiles(self, name: str) -> list[float]:
        """Lowest, 5%, median, 95%, highest, and the mean of a measure."""
        values = np.array(self.values[name])
        return [*np.quantile(values, QUANTILES).tolist(), float(values.mean())]

    def as_json(self) -> dict[str, Any]:
        """For `statistics.json`."""
        names = ("min", "p05", "median", "p95", "max", "mean")
        return {
            "total": self.total,
            "measured": self.measured,
            "sources": dict(self.sources),
            "families": dict(self.families),
            "measures": {name: dict(zip(names, self.quantiles(name), strict=True)) for name in MEASURES},
            "skipped": dict(self.skipped),
        }

    def as_text(self) -> str:
        """A table for the terminal."""
        lines = [self.headline]
        for title, counts in (("source", self.sources), ("family", self.families)):
            lines += [f"  {title} {name}: {count}" for name, count in counts.most_common()]
        lines += ["", f"{'':34}{'min':>9}{'5%':>9}{'median':>9}{'95%':>9}{'max':>9}{'mean':>9}"]
        for name, label in MEASURES.items():
            lines.append(f"{label:34}" + "".join(f"{short(value):>9}" for value in self.quantiles(name)))
        lines += ["", f"{sum(self.skipped.values())} items skipped"]
        lines += [f"  {count} x {reason}" for reason, count in self.skipped.most_common()]
        return "\n".join(lines)


def sample(total: int, count: int, seed: int = 0) -> Sequence[int]:
    """`count` examples out of `total`, in order; all of them where there are no more, or with count 0."""
    if not count or count >= total:
        return range(total)
    return sorted(permutation(total, seed, "sample")[:count].tolist())


def measure(
    items: Iterable[tuple[Conversation, Example]], total: int | None, skipped: Counter[str], processor: Processor
) -> Statistics:
    """Adds up the measures of some examples.

    Args:
        items: the examples with the conversations they were made from.
        total: examples in the whole data set, None for a stream.
        skipped: left-out items by kind of reason.
    """
    statistics = Statistics(total, skipped=skipped)
    for conversation, example in items:
        statistics.add(conversation, example, processor)
    return statistics


def short(value: float) -> str:
    """A number in at most four significant digits, without an exponent."""
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}" if value < 10 else f"{value:.1f}"

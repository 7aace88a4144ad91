"""The pocket world as a source: generated images with conversations, in any number."""

from __future__ import annotations

from dataclasses import replace

from data_prep.conversation import Conversation
from data_prep.pocket import world
from data_prep.sources.base import Source
from data_prep.sources.kinds import SourceConfig
from data_prep.splits import Split

DEFAULT_NUM_EXAMPLES = 4000


class PocketSource(Source):
    """`world.sample` by index; the splits share no image."""

    has_splits = True
    is_trusted = True

    def __init__(self, split: Split, families: list[str], num_examples: int, joined: int = 1) -> None:
        self.name = f"pocket/{split}"
        self.split, self.families, self.num_examples, self.joined = split, families or None, num_examples, joined

    def __len__(self) -> int:
        return self.num_examples

    def conversation(self, index: int) -> Conversation:
        first = index * self.joined
        parts = [world.sample(str(self.split), one, self.families) for one in range(first, first + self.joined)]
        found = parts[0] if self.joined == 1 else replace(parts[0], messages=[turn for part in parts for turn in part.messages])
        found.meta.setdefault("index", index)
        return found

    def fingerprint(self) -> str:
        joined = f":{self.joined}" if self.joined > 1 else ""
        return f"pocket:{self.split}:{self.families}:{self.num_examples}{joined}"


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str) -> Source:
    """Opens a split of the pocket world of `num_examples` (default 4000); raises ValueError for an unknown family."""
    unknown = sorted(set(config.families) - set(world.FAMILIES))
    if unknown:
        raise ValueError(f"data.sources.{label}.families: {unknown[0]!r}; allowed: {', '.join(world.FAMILIES)}")
    return PocketSource(split, config.families, config.num_examples or DEFAULT_NUM_EXAMPLES, config.joined)

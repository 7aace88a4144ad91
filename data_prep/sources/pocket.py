"""The pocket world as a source: generated images with conversations, in any number."""

from __future__ import annotations

from data_prep.conversation import Conversation
from data_prep.pocket import world
from data_prep.sources import SourceConfig
from data_prep.sources.base import Source
from data_prep.splits import Split

DEFAULT_NUM_EXAMPLES = 4000


class PocketSource(Source):
    """`world.sample` by index; the splits share no image."""

    has_splits = True
    is_trusted = True

    def __init__(self, split: Split, families: list[str], num_examples: int) -> None:
        self.name = f"pocket/{split}"
        self.split, self.families, self.num_examples = split, families or None, num_examples

    def __len__(self) -> int:
        return self.num_examples

    def conversation(self, index: int) -> Conversation:
        found = world.sample(str(self.split), index, self.families)
        found.meta.setdefault("index", index)
        return found

    def fingerprint(self) -> str:
        return f"pocket:{self.split}:{self.families}:{self.num_examples}"


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str) -> Source:
    """Opens a split of the pocket world of `num_examples` (default 4000); raises ValueError for an unknown family."""
    unknown = sorted(set(config.families) - set(world.FAMILIES))
    if unknown:
        raise ValueError(f"data.sources.{label}.families: {unknown[0]!r}; allowed: {', '.join(world.FAMILIES)}")
    return PocketSource(split, config.families, config.num_examples or DEFAULT_NUM_EXAMPLES)

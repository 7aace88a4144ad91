"""The pocket world: conversations about generated images.

`sample(split, index)` is a pure function of its arguments. Images of two splits are never equal: the background colour, which
every image shows in its corner, belongs to one split (see `palette.background`).
`PocketSource` is the world as a source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from data_prep.conversation import Conversation
from data_prep.pocket import scenes
from data_prep.pocket.palette import SPLITS, Dialogue, Phraser
from data_prep.sources.base import Source, Split
from data_prep.sources.files import SourceConfig

DEFAULT_NUM_EXAMPLES = 4000
GENERATORS: dict[str, Callable[[Phraser, str], Dialogue]] = {
    "caption": scenes.generate_caption,
    "question": scenes.generate_question,
    "sign": scenes.generate_sign,
    "chart": scenes.generate_chart,
    "clip": scenes.generate_video,
    "compare": scenes.generate_comparison,
    "text": scenes.generate_text,
}
FAMILIES = tuple(GENERATORS)
GENERATORS["bare"] = scenes.generate_bare  # at the start of training only
WEIGHTS = {"caption": 24, "question": 21, "sign": 13, "chart": 21, "clip": 12, "compare": 5, "text": 4}


def sample(split: str, index: int, families: Sequence[str] | None = None) -> Conversation:
    """Generates conversation number `index` of a split; raises ValueError for an unknown split or family.

    Args:
        split: `train`, `validation` or `test`.
        families: task families to select from; None: all, by `WEIGHTS`.
    """
    if split not in SPLITS:
        raise ValueError(f"split: {split!r} is not one of {', '.join(SPLITS)}")
    names = tuple(families) if families is not None else FAMILIES
    unknown = [name for name in names if name not in GENERATORS]
    if unknown or not names:
        raise ValueError(f"families: {unknown or names!r} is not among {', '.join(FAMILIES)}")
    seed = hashlib.sha256(f"{split}/{index}/{','.join(names)}".encode()).digest()
    phraser = Phraser(int.from_bytes(seed[:8], "big"))
    family = phraser.choices(names, [WEIGHTS.get(name, 1) for name in names])[0]
    dialogue = GENERATORS[family](phraser, split)
    meta = {"truth": dialogue.truth, "expect": [turn.expect for turn in dialogue.turns]}
    return Conversation(f"{split}-{index}", messages(dialogue), source="pocket", family=family, meta=meta)


def messages(dialogue: Dialogue) -> list[dict]:
    """Returns chat messages; images (or the video) come first in the first question."""
    media: list[dict] = [{"type": "image", "image": image} for image in dialogue.images]
    if dialogue.is_video:
        media = [{"type": "video", "video": dialogue.images}]
    chat: list[dict] = []
    for number, turn in enumerate(dialogue.turns):
        question = [*(media if not number else []), {"type": "text", "text": turn.question}]
        chat.append({"role": "user", "content": question})
        chat.append({"role": "assistant", "content": [{"type": "text", "text": turn.answer}]})
    return chat


class PocketSource(Source):
    """`sample` by index; the splits share no image."""

    has_splits = True
    is_trusted = True

    def __init__(self, split: Split, families: list[str], num_examples: int, joined: int = 1) -> None:
        self.name = f"pocket/{split}"
        self.split, self.families, self.num_examples, self.joined = split, families or None, num_examples, joined

    def __len__(self) -> int:
        return self.num_examples

    def conversation(self, index: int) -> Conversation:
        first = index * self.joined
        parts = [sample(str(self.split), number, self.families) for number in range(first, first + self.joined)]
        joined = replace(parts[0], messages=[message for part in parts for message in part.messages])
        joined.meta.setdefault("index", index)
        return joined

    def fingerprint(self) -> str:
        joined = f":{self.joined}" if self.joined > 1 else ""
        return f"pocket:{self.split}:{self.families}:{self.num_examples}{joined}"


def open_source(label: str, config: SourceConfig, split: Split, cache_dir: str) -> Source:
    """Opens a split of the pocket world of `num_examples` (default 4000); raises ValueError for an unknown family."""
    unknown = sorted(set(config.families) - set(FAMILIES))
    if unknown:
        raise ValueError(f"data.sources.{label}.families: {unknown[0]!r}; allowed: {', '.join(FAMILIES)}")
    return PocketSource(split, config.families, config.num_examples or DEFAULT_NUM_EXAMPLES, config.joined)

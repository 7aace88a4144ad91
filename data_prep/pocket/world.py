"""The pocket world: conversations about pictures drawn from a seed.

`sample(split, index)` is a pure function of its arguments. Pictures of two splits are never equal: the colour of
the background, which every picture shows in its corner, belongs to one split (see `palette.background`).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

from data_prep.conversation import Conversation
from data_prep.pocket import readings, scenes
from data_prep.pocket.palette import SPLITS
from data_prep.pocket.turns import Story

Teller = Callable[[random.Random, str], Story]

TELLERS: dict[str, Teller] = {
    "caption": scenes.tell_caption,
    "question": scenes.tell_question,
    "sign": readings.tell_sign,
    "chart": readings.tell_chart,
    "clip": readings.tell_clip,
    "compare": scenes.tell_compare,
    "text": readings.tell_text,
}
FAMILIES = tuple(TELLERS)
WEIGHTS = {"caption": 24, "question": 21, "sign": 13, "chart": 21, "clip": 12, "compare": 5, "text": 4}
WARM_UP: dict[str, Teller] = {"bare": scenes.tell_bare}


def sample(split: str, index: int, families: Sequence[str] | None = None) -> Conversation:
    """Draw and word the conversation number `index` of a split.

    Args:
        split: `train`, `validation` or `test`.
        index: any non-negative number.
        families: the task families to choose from (default: all, by their usual weights).

    Raises:
        ValueError: unknown split or family.
    """
    if split not in SPLITS:
        raise ValueError(f"split: {split!r} is not one of {', '.join(SPLITS)}")
    names = tuple(families) if families is not None else FAMILIES
    unknown = [name for name in names if name not in TELLERS and name not in WARM_UP]
    if unknown or not names:
        raise ValueError(f"families: {unknown or names!r} is not among {', '.join(FAMILIES)}")
    seed = hashlib.sha256(f"{split}/{index}/{','.join(names)}".encode()).digest()
    rng = random.Random(int.from_bytes(seed[:8], "big"))
    family = rng.choices(names, [WEIGHTS.get(name, 1) for name in names])[0]
    story = (TELLERS | WARM_UP)[family](rng, split)
    meta = {"truth": story.truth, "expect": [turn.expect for turn in story.turns]}
    return Conversation(f"{split}-{index}", messages(story), source="pocket", family=family, meta=meta)


def messages(story: Story) -> list[dict]:
    """Chat messages; pictures (or the clip) come first in the first question."""
    seen: list[dict]
    if story.is_clip:
        seen = [{"type": "video", "video": story.pictures}]
    else:
        seen = [{"type": "image", "image": picture} for picture in story.pictures]
    talk: list[dict] = []
    for number, turn in enumerate(story.turns):
        question = [*(seen if not number else []), {"type": "text", "text": turn.question}]
        talk.append({"role": "user", "content": question})
        talk.append({"role": "assistant", "content": [{"type": "text", "text": turn.answer}]})
    return talk

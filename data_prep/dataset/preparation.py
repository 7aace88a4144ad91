"""The time that a core needs to prepare examples with images: opening, resizing, normalizing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from data_prep.chat import encode_example
from data_prep.conversation import BadItem, media_parts
from data_prep.dataset.dataset import ConversationDataset

NUM_PREPARED = 8  # examples


@dataclass(frozen=True)
class Preparation:
    """What a few examples of a dataset took.

    Attributes:
        image_s: seconds of one core per image or video, text included.
        images: images and videos per example.
    """

    image_s: float
    images: float

    def line(self, workers: int) -> str:
        """Returns one line: the time of an image, and how many images this number of workers prepares per second."""
        by = f"{workers} workers prepare" if workers else "the thread beside training prepares"
        rate = max(1, workers) / self.image_s
        return f"preparing an image takes {1e3 * self.image_s:.0f} ms of a core; {by} {rate:.0f} images/s (data.num_workers)"


def measure_preparation(dataset: Any) -> Preparation | None:
    """Prepares a few examples, evenly spaced; None if none of them has an image, for cached examples, and for a stream."""
    if not isinstance(dataset, ConversationDataset):
        return None
    positions = range(0, len(dataset), max(1, len(dataset) // NUM_PREPARED))[:NUM_PREPARED]
    timed = [_timed(dataset, position) for position in (0, *positions)][1:]  # the first call of all imports modules
    images = sum(count for count, _ in timed)
    return Preparation(sum(cpu_s for count, cpu_s in timed if count) / images, images / len(timed)) if images else None


def _timed(dataset: ConversationDataset, position: int) -> tuple[int, float]:
    """Returns the images and videos of an example and the seconds of a core that it takes; none of an invalid one."""
    started_s = time.process_time()
    try:
        conversation = dataset.conversation(position)
        count = sum(1 for _ in media_parts(conversation.messages))
        encode_example(conversation, dataset.processor, dataset.config.num_frames)
    except BadItem:  # training reports it
        return 0, 0.0
    return count, time.process_time() - started_s

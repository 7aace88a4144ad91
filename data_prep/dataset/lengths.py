"""Lengths of examples: the outcome of those longer than `data.max_length`, and the lengths of all examples of an index.

A length is the number of tokens that the example has when it is built. It is measured from the text and the headers of images,
without decoding pixels. An image with a valid header and corrupt pixels is measured here and fails when it is opened; lengths
then describe that example, not the one that takes its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from data_prep.cache import computed_once
from data_prep.chat import Fit, Lengths, example_lengths, leading_turns, naming_faults, segments, turn_ends
from data_prep.config import DataConfig, OnLong
from data_prep.conversation import BadItem, Conversation, check_conversation, media_parts
from data_prep.dataset.index import INVALID, Index, has_repaired_item, result_folder
from data_prep.workers import mapped
from sage.inputs.media import image_size, limited_size, source_of, video_size
from sage.inputs.processing import Processor, Segment
from sage.inputs.video import Size
from sage.io.progress import progress_bar

LENGTHS = "lengths.npy"  # of every example before it is shortened
CHUNK_SIZE = 256  # examples whose texts are tokenized together
T = TypeVar("T")


@dataclass
class LongExamples:
    """The examples of a data set that exceed `max_length`."""

    total: int | None  # examples of the data set; None for a stream
    max_length: int | None
    on_long: OnLong
    counts: Counter[Fit] = field(default_factory=Counter)  # of the measured examples
    longest: int = 0  # tokens of the longest measured example before it is shortened
    shortest: int = 0  # tokens of the shortest first turn

    def add(self, lengths: Lengths) -> None:
        self.shortest = min(self.shortest or lengths.first_turn, lengths.first_turn)
        self.longest = max(self.longest, lengths.total)
        self.counts[lengths.fit(self.max_length, self.on_long)] += 1

    @property
    def num_measured(self) -> int:
        return self.counts.total()

    @property
    def num_long(self) -> int:
        return self.num_measured - self.counts[Fit.kept]

    @property
    def dropped_share(self) -> float:
        """Share of the measured examples that are dropped."""
        return self.counts[Fit.dropped] / max(1, self.num_measured)

    def line(self) -> str:
        """Returns one line: the number of examples that are too long, their outcome, and the value that keeps them."""
        if not self.num_long:
            limit = "no data.max_length" if self.max_length is None else f"data.max_length={self.max_length}"
            return f"the longest of {self._extent()} has {self.longest} tokens ({limit})"
        fates = [f"{self.counts[Fit.shortened]} shortened"] if self.counts[Fit.shortened] else []
        fates += [f"{self.counts[Fit.dropped]} dropped, {self.dropped_share:.0%} of all"] if self.counts[Fit.dropped] else []
        return (
            f"{self.num_long} of {self._extent()} are too long for data.max_length={self.max_length}: {' and '.join(fates)} "
            f"(data.on_long={self.on_long}); data.max_length={self.longest} keeps all of them complete"
        )

    def check(self, allowed: float = 1.0) -> None:
        """Raises ValueError with the `refusal`, if there is one."""
        if reason := self.refusal(allowed):
            raise ValueError(reason)

    def refusal(self, allowed: float = 1.0) -> str:
        """Returns why these examples are refused: all measured ones would be dropped, or more than the share `allowed` without
        `data.on_long=drop`; else "".
        """
        share = self.dropped_share
        if share < 1 and (share <= allowed or self.on_long is OnLong.drop):
            return ""
        number = "all" if share == 1 else f"{share:.0%}"
        reason = f"whose first turns have at least {self.shortest} tokens" if share == 1 else f"more than {allowed:.0%}"
        accepted = "" if share == 1 else ", data.on_long=drop trains on the others"
        return (
            f"data.max_length: {self.max_length}; drops {number} of {self._extent()} (data.on_long={self.on_long}), {reason}; "
            f"data.max_length={self.longest} keeps all of them complete{accepted}, "
            "and data.max_pixels scales images down"
        )

    def _extent(self) -> str:
        if self.num_measured == self.total:
            return f"{self.total} examples"
        return f"{self.num_measured} measured examples" + (f" (of {self.total})" if self.total is not None else "")


def find_long(config: DataConfig, lengths: Sequence[Lengths]) -> LongExamples:
    long = LongExamples(len(lengths), config.max_length, config.on_long)
    for item in lengths:
        long.add(item)
    return long


def as_array(lengths: Iterable[Lengths]) -> np.ndarray:
    """Returns lengths as int64 [N, 3], the columns in the order of `Lengths`."""
    return np.array(list(lengths), dtype=np.int64).reshape(-1, len(Lengths._fields))


@dataclass
class Measuring:
    """Measures examples by their position in an index."""

    config: DataConfig
    index: Index
    processor: Processor
    sizes: dict[str, Size] = field(default_factory=dict)  # of images by path, since several rows may share one

    def full(self, on_invalid: Callable[[BadItem], object]) -> np.ndarray:
        """Returns the `Lengths` of all examples before they are shortened, int64 [N, 3]; zeros for an invalid one.

        They are measured once and cached, for any `data.max_length`. Invalid examples go to `on_invalid`.
        """
        folder = result_folder(self.config, self.index, self.processor, "lengths")
        write = partial(self._write_full, on_invalid)
        with computed_once(folder, write, lambda: has_repaired_item(folder, self._check)):
            lengths: np.ndarray = np.load(folder / LENGTHS)
            return lengths

    def built(self, full: np.ndarray) -> np.ndarray:
        """Returns the tokens of every example as it is built, int64 [N], given the result of `full`.

        An example that is invalid or dropped has those of the next valid one, which takes its place (`ConversationDataset`).
        """
        limit, on_long = self.config.max_length, self.config.on_long
        lengths: np.ndarray = full[:, 0].copy()
        if limit is not None:
            long = np.flatnonzero(lengths > limit)
            is_shortened = [Lengths(*row).fit(limit, on_long) is Fit.shortened for row in full[long].tolist()]
            lengths[long] = 0
            if any(is_shortened):
                lengths[long[is_shortened]] = self._shortened(limit, long[is_shortened])
        valid = np.flatnonzero(lengths)
        following = np.searchsorted(valid, np.arange(len(lengths))) % max(1, len(valid))
        return lengths[valid[following]] if len(valid) else lengths

    def _write_full(self, on_invalid: Callable[[BadItem], object], folder: Path) -> None:
        total, lengths, invalid = len(self.index), [], []
        for position, item in enumerate(progress_bar(self._mapped(self._full, range(total)), "measuring lengths", total)):
            if isinstance(item, BadItem):
                on_invalid(item)
                invalid.append(position)
            lengths.append(Lengths(0, 0, 0) if isinstance(item, BadItem) else item)
        np.save(folder / LENGTHS, as_array(lengths))
        np.save(folder / INVALID, np.array(invalid, dtype=np.int64).reshape(-1, 1))

    def _full(self, positions: Sequence[int]) -> list[Lengths | BadItem]:
        masks = self._masks(positions)
        return [mask if isinstance(mask, BadItem) else example_lengths({"loss_mask": mask}) for mask in masks]

    def _check(self, position: int) -> None:
        [lengths] = self._full([position])
        if isinstance(lengths, BadItem):
            raise lengths

    def _shortened(self, limit: int, positions: np.ndarray) -> np.ndarray:
        """Returns the tokens of the examples at these positions, which are shortened to `limit`; cached."""

        def write(folder: Path) -> None:
            lengths = self._mapped(partial(self._measure_shortened, limit), positions.tolist())
            measured = list(progress_bar(lengths, "measuring shortened examples", len(positions)))
            np.save(folder / LENGTHS, np.array(measured, dtype=np.int64))

        folder = result_folder(self.config, self.index, self.processor, "shortened", limit, self.config.on_long)
        with computed_once(folder, write):
            lengths: np.ndarray = np.load(folder / LENGTHS)
            return lengths

    def _measure_shortened(self, limit: int, positions: Sequence[int]) -> list[int]:
        conversations = [self.index.conversation(position) for position in positions]
        shortened = []
        for conversation, mask in zip(conversations, self._masks(conversations), strict=True):
            if isinstance(mask, BadItem):
                raise mask
            shortened.append(leading_turns(check_conversation(conversation), turn_ends(mask), limit))
        masks = self._masks([conversation for conversation, _ in shortened])
        lengths = [0 if isinstance(mask, BadItem) else len(mask) for mask in masks]
        return [min(length, limit) if is_cut else length for length, (_, is_cut) in zip(lengths, shortened, strict=True)]

    def _mapped(self, measure: Callable[[Sequence[int]], list[T]], positions: Sequence[int]) -> Iterator[T]:
        chunks = [positions[first : first + CHUNK_SIZE] for first in range(0, len(positions), CHUNK_SIZE)]
        for chunk in mapped(measure, chunks, len(positions)):
            yield from chunk

    def _masks(self, items: Sequence[int | Conversation]) -> list[Tensor | BadItem]:
        """Returns the loss mask [T] of every conversation, given or by its position, or its error; tokenizes them together."""
        masks: list[Tensor | BadItem] = []
        chats: list[list[Segment]] = []
        waiting: list[tuple[int, list[int]]] = []  # index in `masks` and tokens that are left out, for each of `chats`
        for item in items:
            try:
                chat, omitted = self._sized(item if isinstance(item, Conversation) else self.index.conversation(item))
            except BadItem as error:
                masks.append(error)
                continue
            chats.append(chat)
            waiting.append((len(masks), omitted))
            masks.append(torch.empty(0))
        counts = self.processor.count_tokens(chats)
        for (index, omitted), chat, tokens in zip(waiting, chats, counts, strict=True):
            supervised = torch.tensor([is_supervised for _, is_supervised in chat])
            masks[index] = supervised.repeat_interleave(torch.tensor(tokens) + torch.tensor(omitted))
        return masks

    def _sized(self, conversation: Conversation) -> tuple[list[Segment], list[int]]:
        """Returns `Processor.with_media_texts` of a conversation; BadItem if it is invalid."""
        conversation = check_conversation(conversation)
        with naming_faults(conversation):
            images, videos, rates = [], [], []
            for part in media_parts(conversation.messages):
                if part["type"] == "image":
                    images.append(limited_size(self._image_size(source_of(part, "image")), part))
                else:
                    size, fps = video_size(part, self.config.num_frames)
                    videos.append(size)
                    rates.append(fps)
            return self.processor.with_media_texts(segments(conversation.messages, self.processor), images, videos, rates)

    def _image_size(self, source: Any) -> Size:
        if not isinstance(source, (str, Path)):
            return image_size(source)
        if str(source) not in self.sizes:
            self.sizes[str(source)] = image_size(source)
        return self.sizes[str(source)]

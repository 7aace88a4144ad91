"""The lengths of all examples of an index, without decoding pixels: from the headers of images and the text.

A length is the number of tokens that the example has when it is built. An image with a valid header and corrupt pixels is
measured here and fails when it is opened; lengths then describe that example, not the one that takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.cache import computed_once
from data_prep.chat import Fit, Lengths, encode_example, example_lengths, leading_turns, segments, turn_ends
from data_prep.config import DataConfig
from data_prep.conversation import BadItem, BadTemplate, Conversation, check_conversation, media_parts
from data_prep.dataset.index import INVALID, Index, has_repaired_item
from data_prep.dataset.lengths import as_array
from data_prep.dataset.prepare import LENGTHS, result_folder
from data_prep.workers import mapped
from sage.inputs.media import image_size, limited_size, source_of, video_size
from sage.inputs.processing import Processor, Segment, TemplateFault
from sage.inputs.video import Size
from sage.io.progress import progress_bar

CHUNK_SIZE = 256  # examples whose texts are tokenized together
Masks = list[Tensor | BadItem]
OnInvalid = Callable[[BadItem], object]


@dataclass
class Measuring:
    """Measures examples by their position in an index.

    Attributes:
        sizes: of the images that have been opened, by path, since several rows may share one.
    """

    config: DataConfig
    index: Index
    processor: Processor
    sizes: dict[str, Size] = field(default_factory=dict)

    def full_lengths(self, positions: Sequence[int]) -> list[Lengths | BadItem]:
        """Returns the lengths of the examples before they are shortened."""
        masks = self._masks([self._conversation(position) for position in positions])
        return [mask if isinstance(mask, BadItem) else example_lengths({"loss_mask": mask}) for mask in masks]

    def shortened_lengths(self, positions: Sequence[int]) -> list[int]:
        """Returns the tokens of examples that exceed `data.max_length` and can be shortened; BadItem if one is invalid."""
        limit = self.config.max_length
        assert limit is not None
        found = [self._conversation(position) for position in positions]
        kept: list[Conversation | BadItem] = []
        are_cut = []
        for conversation, mask in zip(found, self._masks(found), strict=True):
            if isinstance(conversation, BadItem):
                raise conversation
            if isinstance(mask, BadItem):
                raise mask
            short, is_cut = leading_turns(check_conversation(conversation), turn_ends(mask), limit)
            kept.append(short)
            are_cut.append(is_cut)
        lengths = [0 if isinstance(mask, BadItem) else len(mask) for mask in self._masks(kept)]
        return [min(length, limit) if is_cut else length for length, is_cut in zip(lengths, are_cut, strict=True)]

    def folder(self, kind: str, *settings: Any) -> Path:
        """Returns the folder in the cache of lengths that depend on these settings."""
        return result_folder(self.config, self.index, self.processor, kind, *settings)

    def check(self, position: int) -> None:
        """Raises the BadItem of an invalid example."""
        [found] = self.full_lengths([position])
        if isinstance(found, BadItem):
            raise found

    def _conversation(self, position: int) -> Conversation | BadItem:
        try:
            return self.index.conversation(position)
        except BadItem as error:
            return error

    def _masks(self, conversations: Sequence[Conversation | BadItem]) -> Masks:
        """Returns the loss mask [T] of every conversation, or its error; their texts are tokenized together."""
        found: Masks = []
        chats: list[list[Segment]] = []
        waiting: list[tuple[int, list[int]]] = []  # place in `found` and tokens that are left out, for each of `chats`
        for conversation in conversations:
            try:
                if isinstance(conversation, BadItem):
                    raise conversation
                sized = self._sized(conversation)
                if sized is None:
                    found.append(encode_example(conversation, self.processor, self.config.num_frames)["loss_mask"])
                    continue
            except BadItem as error:
                found.append(error)
                continue
            chats.append(sized[0])
            waiting.append((len(found), sized[1]))
            found.append(torch.empty(0))
        counts = self.processor.count_tokens(chats)
        for (place, omitted), chat, tokens in zip(waiting, chats, counts, strict=True):
            supervised = torch.tensor([is_supervised for _, is_supervised in chat])
            found[place] = supervised.repeat_interleave(torch.tensor(tokens) + torch.tensor(omitted))
        return found

    def _sized(self, conversation: Conversation) -> tuple[list[Segment], list[int]] | None:
        """Returns `Processor.with_media_texts` of a conversation; BadItem if it is invalid."""
        conversation = check_conversation(conversation)
        try:
            parts = list(media_parts(conversation.messages))
            images = [
                limited_size(self._image_size(source_of(part, "image")), part) for part in parts if part["type"] == "image"
            ]
            measured = [video_size(part, self.config.num_frames) for part in parts if part["type"] == "video"]
            videos, rates = [size for size, _ in measured], [fps for _, fps in measured]
            return self.processor.with_media_texts(segments(conversation.messages, self.processor), images, videos, rates)
        except TemplateFault as error:
            raise conversation.error(str(error), BadTemplate) from error
        except ValueError as error:
            raise conversation.error(str(error)) from error

    def _image_size(self, source: Any) -> Size:
        if not isinstance(source, (str, Path)):
            return image_size(source)
        path = str(source)
        if path not in self.sizes:
            self.sizes[path] = image_size(source)
        return self.sizes[path]


def full_lengths(measuring: Measuring, on_invalid: OnInvalid) -> np.ndarray:
    """Returns the `Lengths` of all examples before they are shortened, int64 [N, 3]; zeros for an invalid one.

    They are measured once and cached, for any `data.max_length`.

    Args:
        on_invalid: called for each example that is found to be invalid.
    """
    folder = measuring.folder("lengths")
    write = partial(_write_full, measuring, on_invalid)
    with computed_once(folder, write, lambda: has_repaired_item(folder, measuring.check)):
        found: np.ndarray = np.load(folder / LENGTHS)
        return found


def built_lengths(measuring: Measuring, full: np.ndarray) -> np.ndarray:
    """Returns the tokens of every example as it is built, int64 [N].

    An example that is invalid or dropped has those of the next valid one, which takes its place (`ConversationDataset`).

    Args:
        full: of `full_lengths`.
    """
    limit, on_long = measuring.config.max_length, measuring.config.on_long
    kept: np.ndarray = full[:, 0].copy()
    if limit is not None:
        long = np.flatnonzero(kept > limit)
        fits = [Lengths(*row).fit(limit, on_long) for row in full[long].tolist()]
        kept[long] = 0
        shortened = long[[fit is Fit.shortened for fit in fits]]
        if len(shortened):
            kept[shortened] = _shortened(measuring, shortened)
    return _with_replacements(kept)


def _with_replacements(lengths: np.ndarray) -> np.ndarray:
    """Returns the lengths with each zero replaced by the next other one, from the beginning after the last."""
    valid = np.flatnonzero(lengths)
    if not len(valid):
        return lengths
    following = np.searchsorted(valid, np.arange(len(lengths)))
    replaced: np.ndarray = lengths[valid[following % len(valid)]]
    return replaced


def _shortened(measuring: Measuring, positions: np.ndarray) -> np.ndarray:
    """Returns the tokens of the examples at these positions, which are shortened; cached."""
    folder = measuring.folder("shortened", measuring.config.max_length, measuring.config.on_long)
    with computed_once(folder, partial(_write_shortened, measuring, positions)):
        found: np.ndarray = np.load(folder / LENGTHS)
        return found


def _write_full(measuring: Measuring, on_invalid: OnInvalid, folder: Path) -> None:
    total = len(measuring.index)
    lengths: list[Lengths] = []
    invalid = []
    measured = (item for chunk in _chunks(measuring.full_lengths, range(total)) for item in chunk)
    for position, item in enumerate(progress_bar(measured, "measuring lengths", total)):
        if isinstance(item, BadItem):
            on_invalid(item)
            invalid.append(position)
        lengths.append(Lengths(0, 0, 0) if isinstance(item, BadItem) else item)
    folder.mkdir(parents=True)
    np.save(folder / LENGTHS, as_array(lengths))
    np.save(folder / INVALID, np.array(invalid, dtype=np.int64).reshape(-1, 1))


def _write_shortened(measuring: Measuring, positions: np.ndarray, folder: Path) -> None:
    found = (length for chunk in _chunks(measuring.shortened_lengths, positions.tolist()) for length in chunk)
    lengths = list(progress_bar(found, "measuring shortened examples", len(positions)))
    folder.mkdir(parents=True)
    np.save(folder / LENGTHS, np.array(lengths, dtype=np.int64))


def _chunks(measure: Callable[[Sequence[int]], list[Any]], positions: Sequence[int]) -> Iterator[list[Any]]:
    chunks = [positions[first : first + CHUNK_SIZE] for first in range(0, len(positions), CHUNK_SIZE)]
    yield from mapped(measure, chunks, len(positions))

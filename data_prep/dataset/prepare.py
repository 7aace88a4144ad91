"""Examples of a dataset that are encoded once, for all ranks and later runs, and memory-mapped by every rank.

Layout of a store: `examples.bin` (one safetensors file per example, concatenated), `columns.npz` (source, tokens and end of
each, and the `PixelTable`), `meta.json` (ids).

Image processors turn 8-bit pixels into normalized floats, 256 values per channel. Pixels are stored as their 8-bit levels and a
table of these values; every image is verified, and values that are not in the table are stored unchanged.

Shapes: P patches (or images), C colour channels.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load, save
from torch.utils.data import Dataset

from data_prep.cache import computed_once
from data_prep.chat import Example, Lengths, encode_example, example_lengths, shorten_example
from data_prep.config import DataConfig, OnBad
from data_prep.conversation import BadItem, TooLong
from data_prep.dataset.index import INVALID, SKIPPED, Index, SkipLog, has_repaired_item, no_item_message, result_folder
from data_prep.dataset.lengths import LENGTHS, as_array, find_long
from data_prep.dataset.order import MixedOrder
from data_prep.sources.base import Split
from data_prep.workers import mapped
from sage.inputs.processing import Processor
from sage.io.progress import progress_bar

logger = logging.getLogger(__name__)
STORE, EXAMPLES, COLUMNS, META = "store", "examples.bin", "columns.npz", "meta.json"
PIXELS = {"pixel_values", "pixel_values_videos"}
LEVELS = 256
PROBE_SIDE = 56
# Encodings, part of the stored field names.
STILL = "still"  # levels of one frame: a Qwen patch of an image repeats it along its temporal axis
LEVEL = "level"  # levels
RAW = ""  # unchanged


def prepare_examples(config: DataConfig, index: Index, processor: Processor, weights: list[float] | None) -> StoredDataset:
    """Encodes every item of an index, or returns the cached examples if no invalid item has changed."""
    folder = result_folder(config, index, processor, "examples", config.max_length, config.on_long)
    write = partial(_write_examples, config, index, processor)

    def encode(position: int) -> None:
        encode_example(index.conversation(position), processor, config.num_frames)

    with computed_once(folder, write, lambda: has_repaired_item(folder, encode)):
        os.utime(folder, ns=(time.time_ns(),) * 2)  # the file system's own time stamps have a resolution of milliseconds
        if config.cache_keep is not None:
            _prune(folder.parent, config.cache_keep)
        return StoredDataset(config, folder, weights)


def _prune(parent: Path, num_kept: int) -> None:
    """Deletes the least recently used subfolders but `num_kept`. Files that a process has open stay readable for it."""
    folders = sorted((path for path in parent.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in folders[: max(0, len(folders) - num_kept)]:
        shutil.rmtree(path, ignore_errors=True)
        logger.info("%s: deleted as least recently used", path)


def _write_examples(config: DataConfig, index: Index, processor: Processor, folder: Path) -> None:
    store, table = folder / STORE, PixelTable.measure(processor)
    store.mkdir()
    skipped = SkipLog(folder / SKIPPED, is_strict=config.on_bad is OnBad.error)
    invalid: list[int] = []
    measured: list[Lengths] = []
    ids: list[str] = []
    columns: list[tuple[int, int, int]] = []  # number of the source, tokens, and end of each example
    encoded = mapped(partial(_encode, config, index, processor, table), range(len(index)), len(index))
    with (store / EXAMPLES).open("wb") as file:
        for position, (item, lengths) in enumerate(progress_bar(encoded, "preparing", len(index))):
            measured += [lengths] if lengths else []
            if isinstance(item, BadItem):
                skipped.add(item)
                invalid += [] if isinstance(item, TooLong) else [position]
                continue
            name, source, num_tokens, data = item
            file.write(data)
            ids.append(name)
            columns.append((source, num_tokens, file.tell()))
    by_column = np.ascontiguousarray(np.array(columns, dtype=np.int64).reshape(-1, 3).T)
    np.savez(store / COLUMNS, columns=by_column, table=table.values)
    (store / META).write_text(json.dumps({"ids": ids, "frames": table.frames}))
    np.save(folder / INVALID, np.array(invalid, dtype=np.int64).reshape(-1, 1))
    np.save(folder / LENGTHS, as_array(measured))
    find_long(config, measured).check()
    if not ids:
        raise ValueError(no_item_message(config, index.sources, Split.train, skipped.items))
    logger.info("prepared %d examples, skipped %d", len(ids), len(index) - len(ids))


def _encode(
    config: DataConfig, index: Index, processor: Processor, table: PixelTable, position: int
) -> tuple[tuple[str, int, int, bytes] | BadItem, Lengths | None]:
    """Returns the id, number of the source, tokens and file of an example, or its error, and its lengths; in workers."""
    lengths = None
    try:
        conversation = index.conversation(position)
        full = encode_example(conversation, processor, config.num_frames)
        lengths = example_lengths(full)
        example = shorten_example(conversation, full, processor, config.max_length, config.on_long, config.num_frames)
    except BadItem as error:
        return error, lengths
    fields = {key: value.numpy() for key, value in example.items() if isinstance(value, torch.Tensor)}
    for key in PIXELS & fields.keys():
        encoding, levels = table.pack(fields.pop(key))
        fields[f"{key}@{encoding}"] = levels
    data = save({key: np.ascontiguousarray(array) for key, array in fields.items()})
    return (conversation.id, int(index.source[position]), len(example["input_ids"]), data), lengths


class StoredDataset(Dataset[Example]):
    """Cached examples, memory-mapped; pixels are decoded on access."""

    def __init__(self, config: DataConfig, folder: Path, weights: list[float] | None) -> None:
        self.folder, self._labels, self.fingerprint = folder, list(config.sources), folder.name
        meta = json.loads((folder / STORE / META).read_text())
        with np.load(folder / STORE / COLUMNS) as stored:
            self._sources, self.lengths, ends = stored["columns"]  # number of the source, and tokens, int64 [N]
            self._table = PixelTable(stored["table"], meta["frames"])
        self._ids, self._ends = meta["ids"], np.concatenate(([0], ends))
        self._data = np.memmap(folder / STORE / EXAMPLES, mode="r") if self._ids else np.zeros(0, dtype=np.uint8)
        self.epoch = MixedOrder(self._sources, weights).epoch

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, position: int) -> Example:
        example = {"id": self._ids[position]}
        for key, array in load(self._bytes(position).tobytes()).items():
            name, is_encoded, encoding = key.partition("@")
            example[name] = torch.from_numpy(self._table.unpack(encoding, array) if is_encoded else array)
        return example

    def source_of(self, position: int) -> str:
        return self._labels[int(self._sources[position])]

    def full_lengths(self) -> np.ndarray:
        """Returns the lengths of all examples before they are shortened, dropped ones included, int64 [N, 3] (`Lengths`)."""
        return np.load(self.folder / LENGTHS)

    def supervised(self, position: int) -> np.ndarray:
        """Returns the supervised ids of an example without reading its pixels, int64."""
        data = self._bytes(position)
        start = 8 + int(data[:8].view(np.int64)[0])  # a safetensors file: the header's length, the header, the tensors
        header = json.loads(data[8:start].tobytes())
        slices = {key: slice(*(start + offset for offset in header[key]["data_offsets"])) for key in ("input_ids", "loss_mask")}
        return data[slices["input_ids"]].view(np.int64)[data[slices["loss_mask"]].view(np.bool_)]

    def _bytes(self, position: int) -> np.ndarray:
        return self._data[self._ends[position] : self._ends[position + 1]]


class PixelTable:
    """The value of each 8-bit level in each channel, float32 [C, 256]; `frames` per patch along the temporal axis."""

    def __init__(self, values: np.ndarray, frames: int) -> None:
        self.values, self.frames = values, frames

    @classmethod
    def measure(cls, processor: Processor) -> PixelTable:
        """Runs the image processor on grey images, so that no formula of its normalization is assumed; empty without one."""
        if processor.image_processor is None:
            return cls(np.zeros((0, LEVELS), dtype=np.float32), 1)
        channels = len(processor.image_processor.image_mean)
        frames = int(getattr(processor.image_processor, "temporal_patch_size", 1))
        columns = []
        for level in range(LEVELS):
            grey = Image.new("RGB", (PROBE_SIDE, PROBE_SIDE), (level,) * 3)
            pixels = processor.family.encode_images(processor.image_processor, [grey])
            columns.append(_by_channel(pixels["pixel_values"].numpy(), channels)[0, :, 0])
        return cls(np.stack(columns, axis=1), frames)

    def pack(self, pixels: np.ndarray) -> tuple[str, np.ndarray]:
        """Returns (encoding, array): levels if the table restores every value exactly, else the pixels."""
        by_channel = _by_channel(pixels, len(self.values))
        low, high = self.values[:, :1], self.values[:, -1:]
        levels = np.rint((by_channel - low) * ((LEVELS - 1) / (high - low))).clip(0, LEVELS - 1).astype(np.uint8)
        if not np.array_equal(self._look_up(levels), by_channel):
            return RAW, pixels
        if pixels.ndim == 2 and self.frames > 1:
            frames = levels.reshape(len(pixels), len(self.values), self.frames, -1)
            if (frames == frames[:, :, :1]).all():
                return STILL, frames[:, :, 0].reshape(len(pixels), -1)
        return LEVEL, levels.reshape(pixels.shape)

    def unpack(self, encoding: str, stored: np.ndarray) -> np.ndarray:
        if encoding == RAW:
            return stored
        channels = len(self.values)
        if encoding == STILL:
            frames = stored.reshape(len(stored), channels, 1, -1).repeat(self.frames, axis=2)
            return self._look_up(frames.reshape(len(stored), channels, -1)).reshape(len(stored), -1)
        return self._look_up(_by_channel(stored, channels)).reshape(stored.shape)

    def _look_up(self, levels: np.ndarray) -> np.ndarray:
        offsets = (np.arange(len(self.values), dtype=np.int32) * LEVELS)[None, :, None]
        return self.values.reshape(-1)[levels + offsets]


def _by_channel(pixels: np.ndarray, channels: int) -> np.ndarray:
    """[P, C * rest] (Qwen patches) or [..., C, H, W] (LLaVA images) -> [P, C, rest]."""
    height_width: Any = pixels.shape[-2] * pixels.shape[-1] if pixels.ndim > 2 else pixels.shape[-1] // channels
    return pixels.reshape(-1, channels, height_width)

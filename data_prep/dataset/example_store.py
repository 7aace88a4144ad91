"""Encoded examples in a folder: one flat file per field, memory-mapped by every rank.

Layout: `meta.json` (ids, source of each, fields), `FIELD.bin` (the concatenated values), `FIELD.shape.npy`
[N, dims] (-1: absent), `table.npy` (`PixelTable`).

Image processors turn 8-bit pixels into normalized floats, 256 values per channel. Pixels are stored as their 8-bit levels and a
table of these values; every image is verified, and values that are not in the table are stored unchanged.

Shapes: P patches (or images), C colour channels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image

from sage.inputs.processing import Processor

Packed = dict[str, np.ndarray]
PIXELS = ("pixel_values", "pixel_values_videos")
LEVELS = 256
PROBE_SIDE = 56
# Encodings, part of the stored field names.
STILL = "still"  # levels of one frame: a Qwen patch of an image repeats it along its temporal axis
LEVEL = "level"  # levels
RAW = ""  # unchanged


def pack(example: dict[str, Any], table: PixelTable) -> Packed:
    """Returns the tensors of one example as arrays by field; pixels are encoded."""
    packed: Packed = {}
    for key, value in example.items():
        if key in PIXELS:
            encoding, array = table.pack(value.numpy())
            packed[f"{key}@{encoding}"] = array
        elif isinstance(value, torch.Tensor):
            packed[key] = value.numpy()
    return packed


def unpack(packed: Packed, table: PixelTable) -> dict[str, torch.Tensor]:
    """Restores the argument of `pack`."""
    example = {}
    for key, array in packed.items():
        name, is_encoded, encoding = key.partition("@")
        example[name] = torch.from_numpy(table.unpack(encoding, array) if is_encoded else array)
    return example


def write_examples(folder: Path, items: Iterable[tuple[str, int, Packed]], table: PixelTable) -> int:
    """Writes (id, source number, packed example) items into a new folder; returns their number.

    Raises:
        ValueError: the dtype or number of dimensions of a field differs between examples.
    """
    folder.mkdir(parents=True)
    ids: list[str] = []
    sources: list[int] = []
    fields: dict[str, dict[str, Any]] = {}
    files: dict[str, IO[bytes]] = {}
    shapes: dict[str, list[tuple[int, ...] | None]] = {}
    try:
        for name, source, packed in items:
            for key, array in packed.items():
                _open_field(folder, key, array, len(ids), fields, files, shapes)
                files[key].write(np.ascontiguousarray(array).tobytes())
                shapes[key].append(array.shape)
            ids.append(name)
            sources.append(source)
            for key in fields:
                shapes[key] += [None] * (len(ids) - len(shapes[key]))
    finally:
        for file in files.values():
            file.close()
    for key, field in fields.items():
        absent = (-1,) * field["dims"]
        np.save(folder / f"{key}.shape.npy", np.array([s or absent for s in shapes[key]], dtype=np.int64))
    np.save(folder / "table.npy", table.values)
    meta = {"ids": ids, "sources": sources, "fields": fields, "frames": table.frames}
    (folder / "meta.json").write_text(json.dumps(meta))
    return len(ids)


def _open_field(folder: Path, key: str, array: np.ndarray, position: int, fields: Any, files: Any, shapes: Any) -> None:
    field = {"dtype": str(array.dtype), "dims": array.ndim}
    if key not in fields:
        fields[key] = field
        files[key] = (folder / f"{key}.bin").open("wb")
        shapes[key] = [None] * position
    elif fields[key] != field:
        raise ValueError(f"{folder}: field {key} is {field} in one example and {fields[key]} in others")


class ExampleStore:
    """The examples of a folder written by `write_examples`, memory-mapped; pixels are decoded on access."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        meta = json.loads((folder / "meta.json").read_text())
        self.ids: list[str] = meta["ids"]
        self.sources = np.array(meta["sources"], dtype=np.int64)
        self.table = PixelTable(np.load(folder / "table.npy"), meta["frames"])
        self._fields = {key: _Field(folder, key, field["dtype"]) for key, field in meta["fields"].items()}

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        packed = {key: array for key, field in self._fields.items() if (array := field.get(index)) is not None}
        return {"id": self.ids[index], **unpack(packed, self.table)}

    def column(self, key: str) -> np.ndarray:
        """Returns the concatenated values of a per-token field."""
        return self._fields[key].values

    def lengths(self) -> np.ndarray:
        """Returns the number of tokens per example, int64 [N]."""
        return self._fields["input_ids"].shapes[:, 0]


class _Field:
    def __init__(self, folder: Path, key: str, dtype: str) -> None:
        self.shapes = np.load(folder / f"{key}.shape.npy")
        sizes = np.where(self.shapes[:, 0] < 0, 0, self.shapes.prod(axis=1))
        self.ends = sizes.cumsum()
        self.values = np.memmap(folder / f"{key}.bin", dtype=dtype, mode="r")

    def get(self, index: int) -> np.ndarray | None:
        shape = tuple(self.shapes[index])
        if shape and shape[0] < 0:
            return None
        end = int(self.ends[index])
        return np.array(self.values[end - int(np.prod(shape)) : end]).reshape(shape)


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
            pixels, _ = processor.family.encode_images(processor.image_processor, [grey])
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
        """Restores the argument of `pack`."""
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

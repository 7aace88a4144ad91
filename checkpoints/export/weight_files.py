"""Reads the weights of an untrusted folder: no pickled code, no paths outside the folder.

Owns: finding and opening weight files. Does not own: the expected tensors (checkpoints.export.formats).
"""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sage.io.files import read_json

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class TensorInfo:
    """Header of a stored tensor; `dtype` is None if torch has no such type."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    file: Path


class Weights:
    """The tensors of a folder: headers are read at once, contents one at a time.

    Args:
        folder: contains model.safetensors, an index of shards, or pytorch_model.bin (opened with `weights_only`).

    Raises:
        ValueError: no weights, or a file that cannot be read; names the file.
    """

    def __init__(self, folder: Path) -> None:
        self._pickled: dict[str, Tensor] = {}
        self.infos: dict[str, TensorInfo] = {}
        for file in _find_files(folder):
            self.infos |= self._read_pickle(file) if file.name == PICKLED else _read_headers(file)
        self.is_pickled = bool(self._pickled)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._pickled:
            return self._pickled[name]
        with safe_open(self.infos[name].file, "pt") as file:
            return file.get_tensor(name)

    def _read_pickle(self, file: Path) -> dict[str, TensorInfo]:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ValueError(
                f"{file}: not a file of tensors only ({reason}); other pickles can run code and are not opened: use safetensors"
            ) from error
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise ValueError(f"{file}: contains more than named tensors; use safetensors")
        self._pickled = content
        return {name: TensorInfo(tuple(value.shape), value.dtype, file) for name, value in content.items()}


def _find_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return _find_shards(folder)
    if (folder / PICKLED).is_file():
        return [folder / PICKLED]
    raise ValueError(f"{folder}: no weights; expected {WEIGHTS}, {INDEX} or {PICKLED}")


def _find_shards(folder: Path) -> list[Path]:
    listed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{folder / INDEX}: has no weight_map")
    names = sorted({str(name) for name in listed.values()})
    for name in names:
        if PurePosixPath(name).name != name or "\\" in name:
            raise ValueError(f"{folder / INDEX}: lists {name!r}, a path outside the folder")
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: missing, but listed in {INDEX}")
    return [folder / name for name in names]


def _read_headers(file: Path) -> dict[str, TensorInfo]:
    try:
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: TensorInfo(tuple(s.get_shape()), SAFETENSORS_DTYPES.get(s.get_dtype()), file)
                for name, s in slices.items()
            }
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: corrupt or not a safetensors file ({error})") from error

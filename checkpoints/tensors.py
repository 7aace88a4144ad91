"""Tensor files of a training state, as safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes tensors from any device; tensors that share memory are copied. Raises OSError if it could not be written."""
    own = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    try:
        save_file(own, path, metadata=dict(metadata or {}))
    except SafetensorError as error:  # raised for a full disk
        raise OSError(f"{path.name}: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a file to the CPU; raises ValueError if the file is missing or not a safetensors file."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error

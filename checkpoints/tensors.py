"""Tensor files of a run state: safetensors, never a pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> None:
    """Writes tensors from any device, each on its own.

    Args:
        facts: short texts for the file's header.

    Raises:
        OSError: the file could not be written.
    """
    own = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    try:
        save_file(own, path, metadata=dict(facts or {}))
    except SafetensorError as error:  # what it raises for a full disk
        raise OSError(f"{path.name}: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU.

    Raises:
        ValueError: the file is missing or no safetensors file.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error

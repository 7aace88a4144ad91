"""Tensor files of a run state: safetensors, never a pickle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.store import SaveFailed


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


@contextmanager
def saving(path: Path, then: str = "go on with run.resume=true") -> Iterator[None]:
    """Within the block a write to `path`, or below it, that fails is told in one line.

    Args:
        then: what to do once there is room.

    Raises:
        SaveFailed: in place of the error of system or library.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise SaveFailed(f"{path}: could not be saved ({error}); make room or repair that folder, then {then}") from error

"""The record of a widened target: the target that it was made from, and the check that both compute the same function.

The MLPs of a widened target have more rows in gate and up than those of its source, and zero columns of down for them: a pass
reads more weights and computes the same. The folder has a manifest and

widened.json: {"source": name or folder, "source_digest": of its tensors, "fingerprint": of the source, "source_size": its
               intermediate_size, "size": the own one, "seed": of the added rows, "statement": "widened from ..; same function"}

Does not own: widening (data_prep.pocket.widen).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from sage.io.files import read_json, write_json
from sage.io.manifest import verify_manifest
from sage.targets.loading import path_of_target
from sage.targets.target import fingerprint_of

RECORD, WEIGHTS = "widened.json", "model.safetensors"
MAX_GROWTH = 100  # largest added weight over the largest of the source, far from an overflow
MLP_WEIGHT = re.compile(r"(?:^|\.)layers\.\d+\.mlp\.(gate|up|down)_proj\.weight$")  # of text layers


@dataclass(frozen=True, kw_only=True)
class Widening:
    """The content of widened.json.

    Attributes:
        source: the target that was widened: a name of conf/target, or an absolute path.
        source_digest: `tensors_digest` of its weights.
        fingerprint: `Target.fingerprint` of the source; drafts made for it are valid for the widened target.
        source_size, size: `intermediate_size` of the source and of the widened target.
        seed: of the added rows.
        statement: what the folder claims.
    """

    source: str
    source_digest: str
    fingerprint: dict[str, Any]
    source_size: int
    size: int
    seed: int
    statement: str = ""

    def write(self, folder: Path) -> None:
        """Writes the record with its statement."""
        sizes = ", ".join(f"{key} {value}" for key, value in self.fingerprint.items())
        statement = f"widened from {self.source} ({sizes}) to an MLP of {self.size}; same function"
        write_json(folder / RECORD, {**asdict(self), "statement": statement})

    @classmethod
    def read(cls, folder: Path) -> Widening:
        """Reads the record; ValueError if it is unreadable or has other keys."""
        content = read_json(folder / RECORD)
        if content.keys() != set(cls.__annotations__):
            raise ValueError(f"{folder / RECORD}: its keys are {', '.join(content)}, not {', '.join(cls.__annotations__)}")
        return cls(**content)


def is_widened(folder: Path) -> bool:
    """Returns whether the folder has a record of a widening."""
    return (folder / RECORD).is_file()


def check_widening(folder: Path) -> Widening:
    """Verifies a widened target's files and the claim of its record; returns the record.

    The function is that of the source if the tensors without the added rows and columns are those of the source, the added
    columns of down are zero, and the products of the added rows cannot overflow (infinity times zero is NaN). The source's own
    folder is compared as well, where it exists.

    Raises:
        ValueError: a file differs from the manifest, or the claim does not hold; names folder, difference and remedy.
    """
    try:
        record = Widening.read(folder)
        verify_manifest(folder)
        problem = _problem(record, folder)
    except (ValueError, TypeError, OSError, SafetensorError) as error:
        problem = str(error)
    if problem:
        raise ValueError(
            f"target: {folder}: {RECORD} claims the function of another target, but {problem}; widen that target again with "
            f"python -m data_prep.pocket.widen"
        )
    return record


def _problem(record: Widening, folder: Path) -> str | None:
    """Returns how the folder differs from its record."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    size, found = config.get_text_config().intermediate_size, fingerprint_of(config)
    if found != record.fingerprint:
        return f"its config.json is that of {found}, not of {record.fingerprint}"
    if not record.source_size < record.size == size:
        return f"its intermediate_size is {size}, widened from {record.source_size} to {record.size}"
    tensors = load_file(folder / WEIGHTS)
    for name, weight in tensors.items():
        kind = projection_of(name)
        if kind == "down" and weight[:, record.source_size :].any():
            return f"{name} is not zero in all columns from {record.source_size} on"
        if kind in ("gate", "up") and not weight.abs().max() <= MAX_GROWTH * weight[: record.source_size].abs().max():
            return f"{name} has rows from {record.source_size} on whose products can overflow, and are then not zero"
    if tensors_digest(narrowed(tensors, record.source_size)) != record.source_digest:
        return "its other tensors are not those of the source"
    source = Path(path_of_target(record.source)) / WEIGHTS
    if source.is_file() and tensors_digest(load_file(source)) != record.source_digest:
        return f"the weights in {source.parent} have changed"
    return None


def projection_of(name: str) -> str | None:
    """Returns gate, up or down for a tensor of a text layer's MLP."""
    found = MLP_WEIGHT.search(name)
    return found[1] if found else None


def narrowed(tensors: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Returns the tensors with MLPs of the first `size` rows of gate and up [size, D] and columns of down [D, size]."""
    parts = {"gate": slice(size), "up": slice(size), "down": (slice(None), slice(size))}
    return {name: tensor[parts[kind]] if (kind := projection_of(name)) else tensor for name, tensor in tensors.items()}


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns a sha256 over names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()

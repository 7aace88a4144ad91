"""Folders of drafts: that of an export, written atomically, verified and uploaded; and the weights of any folder, read safely.

An export appears under its name only when complete (sage.io.folders describes the temporary names). Reading weights runs no
pickled code and opens no path outside the folder.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sage.drafts.location import EXPORT_INFO
from sage.io.files import read_json
from sage.io.folders import new_folder, restore_interrupted
from sage.io.manifest import MANIFEST, CorruptFolder, has_manifest, verify_manifest, write_manifest

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"

SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SAFETENSORS_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool, "U8": torch.uint8}


@contextmanager
def new_export(out: Path, step: int, overwrite: bool = False) -> Iterator[Path]:
    """Yields a folder to write into; it is checksummed and renamed to `out` when the block ends, removed if it fails.

    ValueError if `out` exists, unless it is an export to overwrite; OSError if the disk is full. `step` goes to the manifest.
    """
    restore_interrupted(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if not has_manifest(out):
            raise ValueError(f"--out {out}: exists and was not written by sage-export; give another folder")
        if not overwrite:
            raise ValueError(f"--out {out}: exists; give another folder, or --overwrite to replace it")
    try:
        with new_folder(out) as part:
            yield part
            write_manifest(part, step)
    except (OSError, SafetensorError) as error:  # safetensors raises the latter for a full disk
        reason = getattr(error, "strerror", None) or error  # without the name of the temporary folder
        raise OSError(f"--out {out}: could not be written ({reason}); no partial export was left there") from error


def export_info(folder: Path) -> dict[str, Any]:
    """Reads sage_export.json; empty if the folder has none."""
    return read_json(folder / EXPORT_INFO) if (folder / EXPORT_INFO).is_file() else {}


def verify_export(folder: Path) -> None:
    """Compares an export with its manifest, and their steps; CorruptFolder names the file that differs."""
    step = verify_manifest(folder)["step"]
    info = export_info(folder)
    if info and info.get("step") != step:  # no file's hash depends on the manifest's step
        raise CorruptFolder(f"{folder / MANIFEST}: corrupt: step {step}, {info.get('step')} in {EXPORT_INFO}")


def push_to_hub(folder: Path, repo_id: str, private: bool = False) -> str:
    """Uploads a verified export in one commit to `owner/name`, created if needed; returns its URL. ValueError if refused."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if repo_id.count("/") != 1:
        raise ValueError(f"--push-to-hub {repo_id}: give a hub id like owner/name")
    verify_export(folder)
    target = (export_info(folder).get("target") or {}).get("name")
    if target and Path(target).exists():
        raise ValueError(f"--push-to-hub: the export names its target {target}, a local folder: export with --target-name")
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True, repo_type="model")
        commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=f"Draft head exported as {folder.name}")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--push-to-hub {repo_id}: {reason}; the export in {folder} is complete: log in with `hf auth login` and push again"
        ) from error
    return str(commit.commit_url)


@dataclass(frozen=True)
class TensorInfo:
    """Header of the tensor `saved_as`; `dtype` is None if torch has no such type."""

    saved_as: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    file: Path


class Weights:
    """The tensors of a folder: headers are read at once, contents one at a time.

    Args:
        folder: contains model.safetensors, an index of shards, or pytorch_model.bin (opened with `weights_only`).
        name_of: from the name in the file to the name here; None: not read.

    Raises:
        ValueError: no weights, or a file that cannot be read; names the file.
    """

    def __init__(self, folder: Path, name_of: Callable[[str], str | None] = str) -> None:
        self._pickled: dict[str, Tensor] = {}
        saved: list[TensorInfo] = []
        for file in _find_files(folder):
            saved += self._read_pickle(file) if file.name == PICKLED else _read_headers(file)
        self.infos: dict[str, TensorInfo] = {name: info for info in saved if (name := name_of(info.saved_as)) is not None}
        self.is_pickled = bool(self._pickled)

    def __getitem__(self, name: str) -> Tensor:
        info = self.infos[name]
        if self.is_pickled:
            return self._pickled[info.saved_as]
        with safe_open(info.file, "pt") as file:
            return file.get_tensor(info.saved_as)

    def _read_pickle(self, file: Path) -> list[TensorInfo]:
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
        return [TensorInfo(name, tuple(value.shape), value.dtype, file) for name, value in content.items()]


def _find_files(folder: Path) -> list[Path]:
    """Returns the files of weights, or of an index the shards, none of which may lie outside the folder."""
    first = next((name for name in (WEIGHTS, INDEX, PICKLED) if (folder / name).is_file()), None)
    if first is None:
        raise ValueError(f"{folder}: no weights; expected {WEIGHTS}, {INDEX} or {PICKLED}")
    if first != INDEX:
        return [folder / first]
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


def _read_headers(file: Path) -> list[TensorInfo]:
    try:
        with safe_open(file, "pt") as opened:
            slices = ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118
            return [TensorInfo(name, tuple(s.get_shape()), SAFETENSORS_DTYPES.get(s.get_dtype()), file) for name, s in slices]
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: corrupt or not a safetensors file ({error})") from error

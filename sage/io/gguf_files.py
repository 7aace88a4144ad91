"""Targets that are one GGUF file: dequantized by transformers into a Hugging Face folder of the user's cache, once per file."""

from __future__ import annotations

import hashlib
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sage.io.files import atomic_path, locked, user_cache_dir

logger = logging.getLogger(__name__)
HEAD_BYTES = 1 << 20  # of a file that identify it, with size and time: they contain its metadata
PROJECTOR = "mmproj"  # in the name of the file with the vision tower, which transformers does not read


def gguf_of(path: str | Path) -> Path | None:
    """Returns the GGUF file of a path: the file itself, or the only one in a folder without config.json."""
    found = Path(path)
    if found.suffix == ".gguf" and found.is_file():
        return found
    if not found.is_dir() or (found / "config.json").is_file():
        return None
    files = [file for file in sorted(found.glob("*.gguf")) if PROJECTOR not in file.name]
    return files[0] if len(files) == 1 else None


def unpacked(file: Path) -> Path:
    """Returns the Hugging Face folder of a GGUF file, which is written unless it exists.

    Raises:
        ValueError: the package `gguf` is missing, or transformers cannot read the file or does not know its architecture.
    """
    stat = file.stat()
    with file.open("rb") as content:
        digest = hashlib.sha256(content.read(HEAD_BYTES) + f"{stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
    folder = user_cache_dir() / "gguf" / f"{file.stem}-{digest[:8]}"
    if folder.is_dir():
        return folder
    if find_spec("gguf") is None:
        raise ValueError(f"target: {file} needs the package gguf; pip install 'sage-draft[quantized]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder, waiting=f"target: another process unpacks {file} ({{lock}})"):
        if not folder.is_dir():
            _unpack(file, folder)
    return folder


def _unpack(file: Path, folder: Path) -> None:
    try:
        with atomic_path(folder) as part:
            lacks = ["generation_config.json, so answers end at its EOS token alone"]
            if not convert_gguf(file, part, None).chat_template:
                lacks.append(f"a chat template, so put a chat_template.jinja into {folder}")
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        remedy = "give a GGUF file of a text model that transformers reads, or the model's Hugging Face folder"
        raise ValueError(f"target: {file} cannot be read ({reason}); {remedy}") from error
    logger.warning("target: %s is dequantized in %s; the file lacks %s", file, folder, " and ".join(lacks))


def convert_gguf(file: Path, folder: Path, dtype: Any) -> Any:
    """Writes weights, configuration and tokenizer of a GGUF file as a Hugging Face folder; returns the tokenizer.

    Args:
        dtype: of the weights; None for bfloat16, or float32 for a file whose tensors are all float32.
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    given: dict[str, Any] = {"gguf_file": file.name}
    is_full = {tensor.tensor_type.name for tensor in GGUFReader(file).tensors} == {"F32"}
    dtype = dtype or (torch.float32 if is_full else torch.bfloat16)
    loaded: Any = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=dtype, **given)
    # transformers does not save a model that was loaded from a GGUF file, so its weights move to one that was not
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = type(loaded)(type(loaded.config).from_dict(settings)).to(dtype)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **given)
    tokenizer.save_pretrained(folder)
    return tokenizer

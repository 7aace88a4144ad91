"""The folder or hub id of the target that a user names: a name of conf/target, a folder, a GGUF file, or a hub id.

transformers dequantizes a GGUF file into a Hugging Face folder of the user's cache, once per file. Imports torch on use.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from sage.io.files import config_dir, locked, package_dir, user_cache_dir
from sage.io.folders import new_folder
from sage.io.ranges import did_you_mean

logger = logging.getLogger(__name__)
CONFIG = "config.json"
BY_PATH = "by_path"  # the choice of conf/target that stands for any folder
HEAD_BYTES = 1 << 20  # of a GGUF file that identify it, with size and time: they contain its metadata
PROJECTOR = "mmproj"  # in the name of the GGUF file with the vision tower, which transformers does not read


def target_names() -> list[str]:
    """Returns the names of conf/target, sorted."""
    return sorted(path.stem for path in (config_dir() / "target").glob("*.yaml") if path.stem != BY_PATH)


def path_of_target(name: str) -> str:
    """Returns the folder or hub id of a name of conf/target, and the unpacked folder of a GGUF file; anything else as it is.

    A folder of that name takes precedence.
    """
    file = config_dir() / "target" / f"{name}.yaml"
    if gguf := gguf_of(os.path.expanduser(name)):
        return str(unpacked(gguf))
    if name == BY_PATH or Path(name).exists() or Path(name).name != name or not file.is_file():
        return name
    path = str(yaml.safe_load(file.read_text(encoding="utf-8"))["path"])
    path = path.replace("${user_cache:}", str(user_cache_dir()))
    return re.sub(r"\$\{package_dir:(\w+)\}", lambda package: package_dir(package[1]), path)


def find_target(name: str, key: str = "target") -> str:
    """Returns `path_of_target`, `~` expanded; ValueError, with the `key` of the setting, for a local path without a model."""
    path = os.path.expanduser(path_of_target(name))
    if looks_local(path) and not Path(path).is_dir():
        hint = did_you_mean(path, target_names())
        raise ValueError(f"{key}: {path}: no such folder{hint}; {how_to_get(path)}")
    refuse_without_config(path, key)
    return path


def how_to_get(path: str) -> str:
    """Returns the remedy for the path of a target that does not exist."""
    if Path(path).is_relative_to(user_cache_dir() / "real"):
        return "python -m data_prep.real builds it"
    return "give a local folder or a hub id like Qwen/Qwen2.5-VL-7B-Instruct"


def refuse_without_config(path: str, key: str = "target") -> None:
    """Raises ValueError for a local folder that holds no config.json."""
    if Path(path).is_dir() and not (Path(path) / CONFIG).is_file():
        raise ValueError(f"{key}: {path}: no {CONFIG} there; give the folder of a model")


def looks_local(path: str) -> bool:
    """Whether a path cannot be a hub id, `owner/name`."""
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path).exists()


# -- GGUF files -----------------------------------------------------------------------------------------------------------


def gguf_of(path: str | Path) -> Path | None:
    """Returns the GGUF file of a path: the file itself, or the only one in a folder without config.json."""
    model = Path(path)
    if model.suffix == ".gguf" and model.is_file():
        return model
    if not model.is_dir() or (model / "config.json").is_file():
        return None
    files = [file for file in sorted(model.glob("*.gguf")) if PROJECTOR not in file.name]
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
        with new_folder(folder) as part:
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

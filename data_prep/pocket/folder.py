"""Writes a pocket target as a Hugging Face folder, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data_prep.pocket import architecture

WEIGHTS = "model.safetensors"
SIZE_LIMIT = 16 * 2**20  # bytes of the weights


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, family: str, folder: Path) -> None:
    """Write weights (bfloat16), configurations, tokenizer and template; replaces an older folder in one rename.

    Raises:
        ValueError: the weights are larger than what is shipped.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".writing-") as scratch:
        inside = Path(scratch) / folder.name
        rounded = type(model)(model.config)
        rounded.load_state_dict(model.state_dict())
        rounded.generation_config = model.generation_config
        rounded.to(torch.bfloat16).save_pretrained(inside)
        tokenizer.save_pretrained(inside)
        (inside / "chat_template.jinja").write_text(architecture.chat_template(family))
        write_json(inside / "preprocessor_config.json", architecture.preprocessor_config(family))
        write_json(inside / "video_preprocessor_config.json", architecture.video_preprocessor_config(family))
        write_json(inside / "processor_config.json", architecture.processor_config(family))
        (inside / WEIGHTS).chmod(0o644)
        if (inside / WEIGHTS).stat().st_size > SIZE_LIMIT:
            raise ValueError(f"{folder}: weights of {(inside / WEIGHTS).stat().st_size} bytes, allowed {SIZE_LIMIT}")
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        inside.rename(folder)
    shutil.rmtree(scratch, ignore_errors=True)

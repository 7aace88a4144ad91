"""Writes a pocket target atomically as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data_prep.pocket import architecture
from sage.io.files import atomic_path, write_json

WEIGHTS = "model.safetensors"
MAX_WEIGHT_BYTES = 16 * 2**20  # the repository contains them


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, family: str, folder: Path) -> None:
    """Writes weights (bfloat16; ValueError above `MAX_WEIGHT_BYTES`), configurations and tokenizer; replaces a folder."""
    with atomic_path(folder) as inside:
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
        if (inside / WEIGHTS).stat().st_size > MAX_WEIGHT_BYTES:
            raise ValueError(f"{folder}: weights of {(inside / WEIGHTS).stat().st_size} bytes, allowed: {MAX_WEIGHT_BYTES}")

"""A random text target for comparisons with engines: a Llama of 62 MB with the tokenizer of the published model of `make real`,
which llama.cpp's converter knows.

Each of its tokens depends mostly on the one before, so that a draft can learn them; its answers are no language and may repeat.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaForCausalLM

from data_prep.real import build_target
from sage.io.folders import new_folder

SIZES = {
    **{"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "initializer_range": 0.05, "tie_word_embeddings": False},
}
EMBEDDING_STD = 0.5
PEAKED = 8.0  # gain of the last norm: distributions as peaked as those of trained models


def build(folder: Path) -> Path:
    """Writes the target's folder unless it exists; returns it."""
    if not folder.is_dir():
        published = build_target()
        torch.manual_seed(0)
        model = LlamaForCausalLM(AutoConfig.from_pretrained(published, **SIZES))
        model.get_input_embeddings().weight.data.normal_(std=EMBEDDING_STD)
        model.model.norm.weight.data.fill_(PEAKED)
        with new_folder(folder) as inside:
            shutil.copytree(published, inside, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
            model.save_pretrained(inside)
    return folder

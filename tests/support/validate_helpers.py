"""A tiny random target on disk with tokenizer and image processor, a draft for it, and a run folder with both."""

from __future__ import annotations

from pathlib import Path

import torch
from support.data_helpers import MEDIA_TOKENS, QWEN_TEMPLATE, byte_tokenizer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import sage
from sage.io.manifest import write_manifest

FAMILY = "qwen2_5_vl"


def save_target(folder: Path, hidden_size: int = 32) -> Path:
    """A Qwen2.5-VL of two layers that reads bytes."""
    tokenizer = byte_tokenizer(FAMILY)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(MEDIA_TOKENS[FAMILY])), strict=True))
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden_size,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [hidden_size // 8 - 2, 1, 1]},
            "bos_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "initializer_range": 0.3,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": hidden_size,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [0],
        },
        **ids,
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.chat_template = QWEN_TEMPLATE
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=256, max_pixels=256).save_pretrained(folder)
    return folder


def save_draft(folder: Path, target: sage.Target) -> Path:
    """A draft with random weights."""
    sage.new_draft(target, "eagle", seed=0).save_pretrained(folder)
    return folder


def save_run(folder: Path, target_folder: Path, num_prompts: int = 2) -> Path:
    """What sage-train leaves behind, as far as sage-validate reads it."""
    target = sage.load_target(target_folder)
    write_manifest(save_draft(folder / "draft", target), step=12)
    (folder / "state").mkdir()
    (folder / "config.yaml").write_text(
        f"""
target: {{name: tiny, path: {target_folder}, revision: null, dtype: fp32}}
data:
  name: pocket
  max_length: 777
  sources: {{pocket: {{kind: pocket}}}}
decode:
  policies: [autoregressive, static]
  options: {{static: {{}}, sage: {{max_depth: 5}}}}
  baselines: [hf_generate]
  num_prompts: {num_prompts}
  max_new_tokens: 6
""",
        encoding="utf-8",
    )
    return folder

"""A tiny random target on disk with tokenizer and image processor, a draft for it, and a run folder with both."""

from __future__ import annotations

from pathlib import Path

from support.data_helpers import save_target as save_target_of

import sage
from sage.io.manifest import write_manifest


def save_target(folder: Path, hidden_size: int = 32) -> Path:
    """A Qwen2.5-VL of two layers that reads bytes."""
    return save_target_of("qwen2_5_vl", folder, hidden_size)


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
  traces: 0
""",
        encoding="utf-8",
    )
    return folder

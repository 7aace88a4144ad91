"""Small random targets of every family in the layout of published folders, for the checks of vLLM.

Their tokenizer is a pocket target's, with other names of its special tokens.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

import sage
from benchmarks.published import build as build_published
from sage.targets.families import FAMILIES

TARGETS = Path(__file__).resolve().parents[2] / "data_prep" / "pocket" / "targets"
POCKET = TARGETS / "pocket_qwen2_5_vl"
EMBEDDING_STD = 0.5
SPECIAL_IDS = range(1024, 1030)  # of the pocket tokenizer
FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
TABLE = yaml.safe_load(Path(__file__).with_name("layouts.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A target of layouts.yaml."""

    config: Mapping[str, Any]
    tokens: Mapping[str, str] = field(default_factory=dict)
    image: Mapping[str, Any] | None = None
    processor: Mapping[str, Any] | None = None
    video: Mapping[str, Any] | None = None
    files: str = POCKET.name
    renames: Mapping[str, str] = field(default_factory=dict)

    def model_config(self) -> Any:
        """Returns the configuration of the model."""
        fields = {key: value for key, value in self.config.items() if key != "type"}
        return getattr(transformers, self.config["type"])(**copy.deepcopy(fields))


LAYOUTS, CONVERTED = ({name: Layout(**row) for name, row in TABLE[key].items()} for key in ("layouts", "llama_cpp"))
PUBLISHED = "published"  # LLaVA-OneVision 0.5B, its layers narrow and few


def save_target(name: str, folder: Path) -> sage.Target:
    """Saves a target of `LAYOUTS`, a pocket target or the published one, and loads it."""
    if name == PUBLISHED:
        save_published(folder)
    elif name in LAYOUTS:
        save_layout(LAYOUTS[name], folder)
    else:
        shutil.copytree(TARGETS / name, folder)
    return sage.load_target(folder, dtype=torch.float32)


def save_layout(layout: Layout, folder: Path) -> None:
    """Saves a random model and its files."""
    config = layout.model_config()
    torch.manual_seed(0)
    model = getattr(transformers, FAMILIES[config.model_type].model_types[config.model_type])(config)
    model.get_input_embeddings().weight.data.normal_(std=EMBEDDING_STD)  # the next token depends mostly on the last one
    model.lm_head.weight.data[list(SPECIAL_IDS)] = 0  # never generated, as in a trained model
    model.save_pretrained(folder)
    template = (TARGETS / layout.files / "chat_template.jinja").read_text()
    if layout.tokens:  # the family adds what is around its images
        template = template.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>\n")
    texts = {"chat_template.jinja": template, **{file: (TARGETS / layout.files / file).read_text() for file in FILES}}
    for file, text in texts.items():
        for old, new in layout.tokens.items():
            text = text.replace(old, new)
        (folder / file).write_text(text)
    save_processors(layout, folder)
    if layout.renames:
        rename_weights(folder / "model.safetensors", layout.renames)


def save_processors(layout: Layout, folder: Path) -> None:
    """Saves the configurations of the processors."""
    stored = json.loads((POCKET / "preprocessor_config.json").read_text())
    shared = {key: value for key, value in stored.items() if key.startswith(("image_", "do_", "res")) and "type" not in key}
    for file, content in (("preprocessor_config", layout.image), ("video_preprocessor_config", layout.video)):
        if content is not None:
            (folder / f"{file}.json").write_text(json.dumps({**shared, **content, **(layout.processor or {})}))
    if layout.processor is not None:
        tokens = {}
        if "<img>" in layout.tokens.values():
            named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
            tokens = {"extra_special_tokens": {**named, "video_token": "<video>"}}
        (folder / "processor_config.json").write_text(json.dumps(layout.processor))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | tokens))


def rename_weights(file: Path, renames: Mapping[str, str]) -> None:
    """Renames weights by their prefixes."""
    weights = load_file(file)
    for old, new in renames.items():
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    save_file(weights, file, metadata={"format": "pt"})


def save_published(folder: Path) -> None:
    """Saves LLaVA-OneVision as published, with few narrow layers, and an lm_head of its own for the first thousand tokens."""
    build_published("llava_onevision_0_5b", folder, torch.device("cpu"), is_small=True)
    config, file = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    config["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    weights, generator = load_file(file), torch.Generator().manual_seed(0)
    embedding = weights["language_model.model.embed_tokens.weight"].normal_(std=EMBEDDING_STD, generator=generator)
    lm_head = torch.zeros_like(embedding)
    lm_head[: SPECIAL_IDS.start].normal_(std=0.05, generator=generator)
    save_file({**weights, "language_model.lm_head.weight": lm_head}, file, metadata={"format": "pt"})

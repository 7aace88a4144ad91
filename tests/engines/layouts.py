"""Small random targets of every family in the layout of published folders, for the checks of vLLM.

Their tokenizer is a pocket target's, with other names of its special tokens; images have 16 visual tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

import sage
from benchmarks.published.folder import build as build_published
from sage.targets.families import FAMILIES

TARGETS = Path(__file__).resolve().parents[2] / "data_prep" / "pocket" / "targets"
POCKET = TARGETS / "pocket_qwen2_5_vl"
IMAGE_SIDE, PATCH = 112, 14  # pixels
EMBEDDING_STD = 0.5
SPECIAL_IDS = range(1024, 1030)  # of the pocket tokenizer
IMAGE, VIDEO = 1028, 1029
FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
SIZE = {"height": IMAGE_SIDE, "width": IMAGE_SIDE}
TEXT = {
    "vocab_size": 1030,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1025,
    "pad_token_id": 0,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}
QWEN2, LLAMA = {"model_type": "qwen2", **TEXT}, {"model_type": "llama", **TEXT, "head_dim": 64}
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 64}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10], "mrope_interleaved": True}
MROPE_QWEN2 = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
VISION = {"depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 16, "out_hidden_size": 128}
VISION |= {"num_position_embeddings": 64, "deepstack_visual_indexes": (0, 1, 2)}
QWEN2_VISION = {"depth": 3, "embed_dim": 64, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2, "patch_size": PATCH}
TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
TOWER |= {"image_size": IMAGE_SIDE, "patch_size": 2 * PATCH}  # 16 patches
FINE_TOWER = {**TOWER, "patch_size": PATCH}  # 64 patches, of which four are merged
CLIP = {"model_type": "clip_vision_model", **TOWER}
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
QWEN_IDS = {**IDS, "vision_start_token_id": 1026, "vision_end_token_id": 1027}
LLAVA_TOKENS = {"<|image_pad|>": "<image>", "<|video_pad|>": "<video>"}
INTERN_TOKENS = {"<|image_pad|>": "<IMG_CONTEXT>", "<|video_pad|>": "<video>", "<|vision_start|>": "<img>"}
INTERN_TOKENS |= {"<|vision_end|>": "</img>"}
SMOL_TOKENS = {"<|image_pad|>": "<image>", "<|video_pad|>": "<end_of_utterance>"}
SMOL_TOKENS |= {"<|vision_start|>": "<fake_token_around_image>", "<|vision_end|>": "<global-img>"}


@dataclass(frozen=True)
class Layout:
    """A target."""

    config: Callable[[], Any]  # returns the configuration of its model
    tokens: Mapping[str, str] = field(default_factory=dict)  # names of the pocket tokenizer's special tokens -> other names
    # image, processor, video: content of preprocessor_config.json (besides what all have in common),
    # processor_config.json and video_preprocessor_config.json; None: there is no such file
    image: Mapping[str, Any] | None = None
    processor: Mapping[str, Any] | None = None
    video: Mapping[str, Any] | None = None
    files: Path = POCKET  # folder of the pocket target
    renames: Mapping[str, str] = field(default_factory=dict)  # prefixes of saved weights -> those of published folders


def qwen_layout(config: Callable[[], Any], processor: str, patch: int, side: int) -> Layout:
    """Returns a layout of Qwen-VL: every image has side x side pixels."""
    sizes = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    sizes |= {"size": {"shortest_edge": side**2, "longest_edge": side**2}}
    video = {"video_processor_type": "Qwen2VLVideoProcessor" if patch == PATCH else "Qwen3VLVideoProcessor"}
    image = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": side**2, "max_pixels": side**2}
    return Layout(config, image={**sizes, **image}, processor={"processor_class": processor}, video={**sizes, **video})


LAYOUTS = {
    "llama": Layout(lambda: transformers.LlamaConfig(**TEXT, head_dim=64, rope_parameters=SCALED)),
    "qwen3": Layout(lambda: transformers.Qwen3Config(**TEXT, head_dim=64)),
    "qwen2": Layout(lambda: transformers.Qwen2Config(**TEXT)),
    "mistral": Layout(lambda: transformers.MistralConfig(**TEXT, head_dim=64, sliding_window=None)),
    "qwen3_moe": Layout(lambda: transformers.Qwen3MoeConfig(**TEXT, head_dim=64, **EXPERTS)),
    "qwen3_vl": qwen_layout(  # three deepstack layers, between which the draft's first feature level lies
        lambda: transformers.Qwen3VLConfig(
            text_config={**TEXT, "head_dim": 64, "rope_parameters": MROPE},
            vision_config=VISION,
            tie_word_embeddings=False,
            **QWEN_IDS,
        ),
        "Qwen3VLProcessor",
        patch=16,
        side=128,
    ),
    "qwen2_vl": qwen_layout(
        lambda: transformers.Qwen2VLConfig(
            text_config={**TEXT, "rope_parameters": MROPE_QWEN2},
            vision_config=QWEN2_VISION,
            tie_word_embeddings=False,
            **QWEN_IDS,
        ),
        "Qwen2VLProcessor",
        patch=PATCH,
        side=IMAGE_SIDE,
    ),
    "llava": Layout(
        lambda: transformers.LlavaConfig(
            text_config=LLAMA,
            vision_config={**CLIP, "image_size": 4 * PATCH, "patch_size": PATCH},
            image_token_index=1026,
            tie_word_embeddings=False,
        ),
        {},
        {"image_processor_type": "CLIPImageProcessor", "size": {"height": 4 * PATCH, "width": 4 * PATCH}}
        | {"do_center_crop": False},
        {"processor_class": "LlavaProcessor", "image_token": "<image>", "patch_size": PATCH}
        | {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        files=TARGETS / "pocket_llava_onevision",
        renames={"vision_tower.": "vision_tower.vision_model."},  # vLLM reads the names of published folders only
    ),
    "llava_next": Layout(
        lambda: transformers.LlavaNextConfig(
            text_config=LLAMA,
            vision_config=CLIP,
            image_grid_pinpoints=[[IMAGE_SIDE, IMAGE_SIDE]],
            image_token_index=IMAGE,
            tie_word_embeddings=False,
        ),
        LLAVA_TOKENS,
        {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": IMAGE_SIDE}, "crop_size": SIZE}
        | {"do_center_crop": True, "image_grid_pinpoints": [[IMAGE_SIDE, IMAGE_SIDE]]},
        {"processor_class": "LlavaNextProcessor", "image_token": "<image>", "patch_size": 2 * PATCH}
        | {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "internvl": Layout(
        lambda: transformers.InternVLConfig(
            text_config=QWEN2,
            vision_config={**FINE_TOWER, "image_size": [IMAGE_SIDE] * 2, "patch_size": [PATCH] * 2},
            image_token_id=IMAGE,
            image_seq_length=16,
            tie_word_embeddings=False,
        ),
        INTERN_TOKENS,
        {"image_processor_type": "GotOcr2ImageProcessor", "size": SIZE, "max_patches": 4, "crop_to_patches": True},
        {"processor_class": "InternVLProcessor", "image_seq_length": 16},
        {"video_processor_type": "InternVLVideoProcessor", "size": SIZE},
    ),
    "smolvlm": Layout(
        lambda: transformers.SmolVLMConfig(
            text_config=LLAMA, vision_config=FINE_TOWER, image_token_id=IMAGE, scale_factor=2, tie_word_embeddings=False
        ),
        SMOL_TOKENS,
        {"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": False, "do_pad": True}
        | {"size": {"longest_edge": IMAGE_SIDE}, "max_image_size": {"longest_edge": IMAGE_SIDE}},
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 16},
        {"video_processor_type": "SmolVLMVideoProcessor", "size": {"longest_edge": IMAGE_SIDE}}
        | {"max_image_size": {"longest_edge": IMAGE_SIDE}, "video_sampling": {"max_frames": 4, "fps": 1}},
    ),
}
LAYOUTS["idefics3"] = Layout(
    lambda: transformers.Idefics3Config(
        text_config=LLAMA, vision_config=FINE_TOWER, image_token_id=IMAGE, scale_factor=2, tie_word_embeddings=False
    ),
    SMOL_TOKENS,
    {**(LAYOUTS["smolvlm"].image or {}), "image_processor_type": "Idefics3ImageProcessor"},
    {"processor_class": "Idefics3Processor", "image_seq_len": 16},
)
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
    config = layout.config()
    torch.manual_seed(0)
    model = getattr(transformers, FAMILIES[config.model_type].model_types[config.model_type])(config)
    model.get_input_embeddings().weight.data.normal_(std=EMBEDDING_STD)  # the next token depends mostly on the last one
    model.lm_head.weight.data[list(SPECIAL_IDS)] = 0  # never generated, as in a trained model
    model.save_pretrained(folder)
    template = (layout.files / "chat_template.jinja").read_text()
    if layout.tokens:  # the family adds what is around its images
        template = template.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>\n")
    texts = {"chat_template.jinja": template, **{file: (layout.files / file).read_text() for file in FILES}}
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

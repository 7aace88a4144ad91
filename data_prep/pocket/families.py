"""The families of the pocket targets: media tokens, processor settings and sizes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from data_prep.pocket.palette import SIDE
from sage.targets.families.qwen2_5_vl import PatchProjection

WIDTH, HEADS, KV_HEADS, INNER = 192, 6, 2, 512
CONTEXT = 32768
PATCH = 14  # pixels
PIXELS = SIDE * SIDE
QWEN_VISION = {
    "depth": 3, "hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "patch_size": PATCH,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": WIDTH,
}  # fmt: skip


class PocketFamily(ABC):
    """Settings of a pocket target that depend on its family.

    Attributes:
        media_tokens: special tokens of the family's images and videos.
        media_text: "image" and "video" -> its text in the chat template, as a Jinja string.
        processors: class of the image processor, of the video processor, and of the Hugging Face processor.
        image_settings: entries of `preprocessor_config.json`; an image is resized to at most 112 x 112 pixels.
        processor_settings: entries of `processor_config.json`.
        num_front_layers: number of leading text layers that stay in place when layers are added.
    """

    name: ClassVar[str]
    media_tokens: ClassVar[tuple[str, ...]]
    media_text: ClassVar[dict[str, str]]
    processors: ClassVar[tuple[str, str, str]]
    image_settings: ClassVar[dict[str, Any]]
    processor_settings: ClassVar[dict[str, Any]] = {}
    num_front_layers: ClassVar[int] = 0
    model_class: ClassVar[type[PreTrainedModel]]

    @abstractmethod
    def config(self, tokenizer: PreTrainedTokenizerBase, layers: int) -> PreTrainedConfig:
        """Returns the configuration of the target with `layers` text layers."""

    def model(self, tokenizer: PreTrainedTokenizerBase, layers: int) -> PreTrainedModel:
        """Returns a model with random weights."""
        return self.model_class(self.config(tokenizer, layers))

    def text_config(self, tokenizer: PreTrainedTokenizerBase, layers: int, **rope: Any) -> dict[str, Any]:
        """Returns the configuration of the text layers."""
        return {
            "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": True, "bos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | rope,
        }  # fmt: skip


class Qwen2_5_VL(PocketFamily):
    name = "qwen2_5_vl"
    media_tokens = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    media_text: ClassVar[dict[str, str]] = {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
    }
    processors = ("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor")
    image_settings: ClassVar[dict[str, Any]] = {
        "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": PIXELS, "longest_edge": PIXELS}, "min_pixels": PIXELS, "max_pixels": PIXELS,
    }  # fmt: skip
    model_class = Qwen2_5_VLForConditionalGeneration

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
        """Returns the media tokens' entries of the configuration."""
        names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
        return dict(zip(names, tokenizer.convert_tokens_to_ids(list(self.media_tokens)), strict=True))

    def config(self, tokenizer: PreTrainedTokenizerBase, layers: int) -> PreTrainedConfig:
        vision = QWEN_VISION | {"tokens_per_second": 2, "window_size": SIDE, "fullatt_block_indexes": [2]}
        text = self.text_config(tokenizer, layers, mrope_section=[4, 6, 6])
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **self.ids(tokenizer))


class LinearPatchProjection(PatchProjection):
    """A patch projection without convolution, whose backward pass takes a tenth of a training step on the CPU."""

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.linear(patches)


class Qwen3_VL(Qwen2_5_VL):
    name = "qwen3_vl"
    processors = ("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor", "Qwen3VLProcessor")
    deepstack: ClassVar[list[int]] = [0, 1]  # of the three vision layers, added to the outputs of the first two text layers
    num_front_layers = len(deepstack)
    model_class = Qwen3VLForConditionalGeneration

    def config(self, tokenizer: PreTrainedTokenizerBase, layers: int) -> PreTrainedConfig:
        positions = (SIDE // PATCH) ** 2
        vision = QWEN_VISION | {"num_position_embeddings": positions, "deepstack_visual_indexes": self.deepstack}
        text = self.text_config(tokenizer, layers, mrope_section=[6, 5, 5], mrope_interleaved=True)
        text |= {"head_dim": WIDTH // HEADS}
        return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **self.ids(tokenizer))

    def model(self, tokenizer: PreTrainedTokenizerBase, layers: int) -> PreTrainedModel:
        model = super().model(tokenizer, layers)
        patch_embed: Any = model.model.visual.patch_embed
        patch_embed.proj = LinearPatchProjection(patch_embed.proj)
        return model


class LlavaOnevision(PocketFamily):
    name = "llava_onevision"
    media_tokens = ("<image>", "<video>")
    media_text: ClassVar[dict[str, str]] = {"image": "<image>\\n", "video": "<video>\\n"}
    processors = ("LlavaOnevisionImageProcessor", "LlavaOnevisionVideoProcessor", "LlavaOnevisionProcessor")
    image_settings: ClassVar[dict[str, Any]] = {
        "size": {"height": SIDE, "width": SIDE}, "image_grid_pinpoints": [[SIDE, SIDE]], "do_pad": True,
    }  # fmt: skip
    processor_settings: ClassVar[dict[str, Any]] = {
        "num_image_tokens": 16, "image_token": "<image>", "video_token": "<video>",
        "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9",
    }  # fmt: skip
    model_class = LlavaOnevisionForConditionalGeneration

    def config(self, tokenizer: PreTrainedTokenizerBase, layers: int) -> PreTrainedConfig:
        vision = {
            "model_type": "siglip_vision_model", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3,
            "num_attention_heads": 6, "image_size": SIDE, "patch_size": 2 * PATCH, "vision_use_head": False,
        }  # fmt: skip
        text = self.text_config(tokenizer, layers) | {"model_type": "qwen2"}
        image_id, video_id = tokenizer.convert_tokens_to_ids(list(self.media_tokens))
        return LlavaOnevisionConfig(
            text_config=text, vision_config=vision, image_token_index=image_id, video_token_index=video_id,
            image_grid_pinpoints=[[SIDE, SIDE]], vision_aspect_ratio="anyres_max_9", tie_word_embeddings=True,
        )  # fmt: skip


FAMILIES = {family.name: family() for family in (Qwen2_5_VL, Qwen3_VL, LlavaOnevision)}


def pocket_family(name: str) -> PocketFamily:
    """Returns a family; ValueError for an unknown one."""
    if name not in FAMILIES:
        raise ValueError(f"family: {name!r} is not one of {', '.join(FAMILIES)}")
    return FAMILIES[name]

"""The two pocket targets before training: tokenizer, chat template, processor settings, configurations.

Models of the classes `Qwen2_5_VLForConditionalGeneration` and `LlavaOnevisionForConditionalGeneration`, deep and narrow: one
text layer has about a twelfth of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
)

from data_prep.pocket.palette import SIDE

FAMILIES = ("qwen2_5_vl", "llava_onevision")
WIDTH, HEADS, KV_HEADS, INNER = 192, 6, 2, 512
VOCAB = 1280
CONTEXT = 32768
CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MEDIA_TOKENS = {
    "qwen2_5_vl": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "llava_onevision": ("<image>", "<video>"),
}
MEDIA_TEXT = {
    "qwen2_5_vl": {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
    },
    "llava_onevision": {"image": "<image>\\n", "video": "<video>\\n"},
}
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
{{- 'IMAGE' -}}
{%- elif part['type'] == 'video' or 'video' in part -%}
{{- 'VIDEO' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def check_family(family: str) -> None:
    """Raises ValueError for an unknown family."""
    if family not in FAMILIES:
        raise ValueError(f"family: {family!r} is not one of {', '.join(FAMILIES)}")


def chat_template(family: str) -> str:
    """Returns the ChatML template with the family's placeholders."""
    text = MEDIA_TEXT[family]
    return TEMPLATE.replace("IMAGE", text["image"]).replace("VIDEO", text["video"])


def new_tokenizer(family: str, texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE tokenizer like Qwen2's on `texts`; it encodes any text."""
    special = [*CHAT_TOKENS, *MEDIA_TOKENS[family]]
    base = Qwen2Tokenizer(model_max_length=CONTEXT)
    tokenizer = base.train_new_from_iterator(texts, VOCAB - len(special), show_progress=False)
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.chat_template = chat_template(family)
    tokenizer.padding_side = "left"
    return tokenizer


def preprocessor_config(family: str) -> dict[str, Any]:
    """Returns the content of `preprocessor_config.json`; an image is resized to at most 112 x 112 pixels."""
    shared = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_rescale": True, "do_normalize": True,
              "rescale_factor": 1 / 255, "do_resize": True, "do_convert_rgb": True, "resample": 3}  # fmt: skip
    if family == "qwen2_5_vl":
        pixels = SIDE * SIDE
        return shared | {
            "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
            "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
            "size": {"shortest_edge": pixels, "longest_edge": pixels}, "min_pixels": pixels, "max_pixels": pixels,
        }  # fmt: skip
    return shared | {
        "image_processor_type": "LlavaOnevisionImageProcessor", "processor_class": "LlavaOnevisionProcessor",
        "size": {"height": SIDE, "width": SIDE}, "image_grid_pinpoints": [[SIDE, SIDE]], "do_pad": True,
    }  # fmt: skip


def processor_config(family: str) -> dict[str, Any]:
    """Returns the content of `processor_config.json`, for the family's Hugging Face processor."""
    if family == "qwen2_5_vl":
        return {"processor_class": "Qwen2_5_VLProcessor"}
    return {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16, "image_token": "<image>",
            "video_token": "<video>",
            "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"}  # fmt: skip


def video_preprocessor_config(family: str) -> dict[str, Any]:
    """Returns the content of `video_preprocessor_config.json`, which is used with torchvision installed."""
    config = preprocessor_config(family)
    name = {"qwen2_5_vl": "Qwen2VLVideoProcessor", "llava_onevision": "LlavaOnevisionVideoProcessor"}[family]
    for key in ("image_processor_type", "image_grid_pinpoints", "do_pad"):
        config.pop(key, None)
    return config | {"video_processor_type": name}


def _text_config(tokenizer: PreTrainedTokenizerBase, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True, "bos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip


def qwen_config(tokenizer: PreTrainedTokenizerBase, layers: int) -> Qwen2_5_VLConfig:
    """Returns the configuration of the Qwen2.5-VL target with `layers` text layers."""
    ids = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision = {
        "depth": 3, "hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2, "window_size": 112,
        "out_hidden_size": WIDTH, "fullatt_block_indexes": [2],
    }  # fmt: skip
    return Qwen2_5_VLConfig(
        text_config=_text_config(tokenizer, layers) | {"rope_parameters": rope}, vision_config=vision,
        image_token_id=ids("<|image_pad|>"), video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"), vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )  # fmt: skip


def llava_config(tokenizer: PreTrainedTokenizerBase, layers: int) -> LlavaOnevisionConfig:
    """Returns the configuration of the LLaVA-OneVision target with `layers` text layers."""
    ids = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3,
        "num_attention_heads": 6, "image_size": SIDE, "patch_size": 28, "vision_use_head": False,
    }  # fmt: skip
    text = _text_config(tokenizer, layers) | {"model_type": "qwen2", "rope_parameters": rope}
    return LlavaOnevisionConfig(
        text_config=text, vision_config=vision, image_token_index=ids("<image>"), video_token_index=ids("<video>"),
        image_grid_pinpoints=[[SIDE, SIDE]], vision_aspect_ratio="anyres_max_9", tie_word_embeddings=True,
    )  # fmt: skip


def new_model(family: str, tokenizer: PreTrainedTokenizerBase, layers: int, seed: int) -> PreTrainedModel:
    """Returns a model of a family with `layers` text layers and random weights."""
    check_family(family)
    torch.manual_seed(seed)
    if family == "qwen2_5_vl":
        model: PreTrainedModel = Qwen2_5_VLForConditionalGeneration(qwen_config(tokenizer, layers))
    else:
        model = LlavaOnevisionForConditionalGeneration(llava_config(tokenizer, layers))
    # The backward pass of fused attention takes half of a step on short sequences.
    model.set_attn_implementation("eager")
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )  # fmt: skip
    return model


@torch.no_grad()
def deepen(model: PreTrainedModel, family: str, tokenizer: PreTrainedTokenizerBase, layers: int, seed: int) -> PreTrainedModel:
    """Returns a model with `layers` text layers that computes the same function; the new layers are spaced evenly.

    The output projections of a new layer are zero, so that it is the identity; its other weights are random.
    """
    deep = new_model(family, tokenizer, layers, seed + 1)
    old, new = model.model.language_model.layers, deep.model.language_model.layers
    places = {round((k + 0.5) * layers / len(old) - 0.5): k for k in range(len(old))}
    state = {name: value for name, value in model.state_dict().items() if ".language_model.layers." not in name}
    deep.load_state_dict(state, strict=False)
    for place, layer in enumerate(new):
        if place in places:
            layer.load_state_dict(old[places[place]].state_dict())
        else:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return deep

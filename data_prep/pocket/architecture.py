"""A pocket target: tokenizer, chat template, processor, random weights, and its Hugging Face folder.

Models are deep and narrow: one text layer has about a twelfth of the parameters.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from data_prep.pocket import world
from data_prep.pocket.palette import SIDE
from sage.inputs.processing import Processor
from sage.io.files import atomic_path, write_json
from sage.targets.families import family_of
from sage.targets.families.qwen2_5_vl import PatchProjection

VOCAB = 1280
WIDTH, HEADS, KV_HEADS, INNER = 192, 6, 2, 512
CONTEXT = 32768
PATCH = 14  # pixels
PIXELS = SIDE * SIDE
WEIGHTS = "model.safetensors"
MAX_WEIGHT_BYTES = 16 * 2**20  # the repository contains them
CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
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


@dataclass(frozen=True, kw_only=True)
class PocketFamily:
    """What differs from family to family."""

    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]
    media_tokens: dict[str, str]  # entry of the configuration -> special token
    media_text: tuple[str, str]  # texts of an image and of a video in the chat template, as Jinja strings
    processors: tuple[str, str, str]  # classes of images, of videos, and of Hugging Face's processor
    image_settings: dict[str, Any]  # of preprocessor_config.json; an image is resized to at most 112 x 112 pixels
    processor_settings: dict[str, Any] = field(default_factory=dict)  # of processor_config.json
    vision: dict[str, Any]  # configuration of the vision tower
    rope: dict[str, Any] = field(default_factory=dict)  # .. of the text layers' rope, in addition to all families'
    text: dict[str, Any] = field(default_factory=dict)  # .. of the text layers
    settings: dict[str, Any] = field(default_factory=dict)  # .. of the model
    num_front_layers: int = 0  # text layers that stay in place when layers are added

    def config(self, tokenizer: PreTrainedTokenizerBase, layers: int) -> PreTrainedConfig:
        """Returns the configuration of the target with `layers` text layers."""
        text = {
            "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": True, "bos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | self.rope,
        } | self.text  # fmt: skip
        ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in self.media_tokens.items()}
        config: Any = self.config_class
        return config(text_config=text, vision_config=dict(self.vision), tie_word_embeddings=True, **self.settings, **ids)

    def processor_files(self) -> dict[str, dict[str, Any]]:
        """Returns the contents of the JSON files of the Hugging Face processor; a video's is used with torchvision alone."""
        image, video, processor = self.processors
        shared = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_rescale": True, "do_normalize": True,
                  "rescale_factor": 1 / 255, "do_resize": True, "do_convert_rgb": True, "resample": 3,
                  "processor_class": processor}  # fmt: skip
        of_videos = {key: value for key, value in self.image_settings.items() if key not in ("image_grid_pinpoints", "do_pad")}
        return {
            "preprocessor_config.json": shared | {"image_processor_type": image} | self.image_settings,
            "video_preprocessor_config.json": shared | of_videos | {"video_processor_type": video},
            "processor_config.json": {"processor_class": processor} | self.processor_settings,
        }


QWEN: dict[str, Any] = {
    "media_tokens": {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
                     "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
    "media_text": ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"),
    "image_settings": {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2,
                       "size": {"shortest_edge": PIXELS, "longest_edge": PIXELS}, "min_pixels": PIXELS, "max_pixels": PIXELS},
}  # fmt: skip
QWEN_VISION = {
    "depth": 3, "hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "patch_size": PATCH,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": WIDTH,
}  # fmt: skip
DEEPSTACK = [0, 1]  # of Qwen3-VL's three vision layers, added to the outputs of the first two text layers
ANYRES: dict[str, Any] = {"image_grid_pinpoints": [[SIDE, SIDE]], "vision_aspect_ratio": "anyres_max_9"}
FAMILIES = {
    "qwen2_5_vl": PocketFamily(
        config_class=Qwen2_5_VLConfig,
        model_class=Qwen2_5_VLForConditionalGeneration,
        processors=("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor"),
        vision=QWEN_VISION | {"tokens_per_second": 2, "window_size": SIDE, "fullatt_block_indexes": [2]},
        rope={"mrope_section": [4, 6, 6]},
        **QWEN,
    ),
    "qwen3_vl": PocketFamily(
        config_class=Qwen3VLConfig,
        model_class=Qwen3VLForConditionalGeneration,
        processors=("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor", "Qwen3VLProcessor"),
        vision=QWEN_VISION | {"num_position_embeddings": (SIDE // PATCH) ** 2, "deepstack_visual_indexes": DEEPSTACK},
        rope={"mrope_section": [6, 5, 5], "mrope_interleaved": True},
        text={"head_dim": WIDTH // HEADS},
        num_front_layers=len(DEEPSTACK),
        **QWEN,
    ),
    "llava_onevision": PocketFamily(
        config_class=LlavaOnevisionConfig,
        model_class=LlavaOnevisionForConditionalGeneration,
        media_tokens={"image_token_index": "<image>", "video_token_index": "<video>"},
        media_text=("<image>\\n", "<video>\\n"),
        processors=("LlavaOnevisionImageProcessor", "LlavaOnevisionVideoProcessor", "LlavaOnevisionProcessor"),
        image_settings={"size": {"height": SIDE, "width": SIDE}, "image_grid_pinpoints": [[SIDE, SIDE]], "do_pad": True},
        processor_settings={
            "num_image_tokens": 16, "image_token": "<image>", "video_token": "<video>",
            "vision_feature_select_strategy": "full", "vision_aspect_ratio": ANYRES["vision_aspect_ratio"],
        },
        vision={
            "model_type": "siglip_vision_model", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3,
            "num_attention_heads": 6, "image_size": SIDE, "patch_size": 2 * PATCH, "vision_use_head": False,
        },
        text={"model_type": "qwen2"},
        settings=ANYRES,
    ),
}  # fmt: skip


def chat_template(family: str) -> str:
    image, video = FAMILIES[family].media_text
    return TEMPLATE.replace("IMAGE", image).replace("VIDEO", video)


def new_tokenizer(family: str, num_texts: int) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE tokenizer like Qwen2's on the first training conversations; it encodes any text."""
    conversations = (world.sample("train", index).messages for index in range(num_texts))
    parts = (part for messages in conversations for message in messages for part in message["content"])
    texts = [part["text"] for part in parts if part["type"] == "text"]
    special = [*CHAT_TOKENS, *FAMILIES[family].media_tokens.values()]
    base = Qwen2Tokenizer(model_max_length=CONTEXT)
    tokenizer = base.train_new_from_iterator(texts, VOCAB - len(special), show_progress=False)
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.chat_template = chat_template(family)
    tokenizer.padding_side = "left"
    return tokenizer


def new_processor(family: str, tokenizer: PreTrainedTokenizerBase) -> Processor:
    """Returns the processor that the saved folder will have."""
    settings, name = FAMILIES[family], "preprocessor_config.json"
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        write_json(Path(scratch) / name, settings.processor_files()[name])
        return Processor.from_pretrained(scratch, family_of(settings.config(tokenizer, 1)))


class LinearPatchProjection(PatchProjection):
    """A patch projection without convolution, whose backward pass takes a tenth of a training step on the CPU."""

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.linear(patches)


def new_model(family: str, tokenizer: PreTrainedTokenizerBase, layers: int, seed: int) -> PreTrainedModel:
    """Returns a model of a family with `layers` text layers and random weights."""
    torch.manual_seed(seed)
    model: Any = FAMILIES[family].model_class(FAMILIES[family].config(tokenizer, layers))
    if family == "qwen3_vl":
        patch_embed = model.model.visual.patch_embed
        patch_embed.proj = LinearPatchProjection(patch_embed.proj)
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
    """Returns a model with `layers` text layers that computes the same function.

    The layers that deepstack features are added to stay in front; the others are spaced evenly between the new ones. The output
    projections of a new layer are zero, so that it is the identity; its other weights are random.
    """
    deep = new_model(family, tokenizer, layers, seed + 1)
    old, new = model.model.language_model.layers, deep.model.language_model.layers
    front = FAMILIES[family].num_front_layers
    rest, room = len(old) - front, layers - front
    sources = {k: k for k in range(front)}  # new layer -> old layer
    sources |= {front + round((k + 0.5) * room / rest - 0.5): front + k for k in range(rest)}
    state = {name: value for name, value in model.state_dict().items() if ".language_model.layers." not in name}
    deep.load_state_dict(state, strict=False)
    for number, layer in enumerate(new):
        if number in sources:
            layer.load_state_dict(old[sources[number]].state_dict())
        else:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return deep


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, family: str, folder: Path) -> None:
    """Writes weights (bfloat16; ValueError above `MAX_WEIGHT_BYTES`), configurations and tokenizer; replaces a folder."""
    with atomic_path(folder) as inside:
        rounded = type(model)(model.config)
        rounded.load_state_dict(model.state_dict())
        rounded.generation_config = model.generation_config
        rounded.to(torch.bfloat16).save_pretrained(inside)
        tokenizer.save_pretrained(inside)
        (inside / "chat_template.jinja").write_text(chat_template(family))
        for name, content in FAMILIES[family].processor_files().items():
            write_json(inside / name, content)
        (inside / WEIGHTS).chmod(0o644)
        if (inside / WEIGHTS).stat().st_size > MAX_WEIGHT_BYTES:
            raise ValueError(f"{folder}: weights of {(inside / WEIGHTS).stat().st_size} bytes, allowed: {MAX_WEIGHT_BYTES}")


def save_random(family: str, folder: Path, layers: int = 2) -> None:
    """Writes a target with random weights, and a tokenizer of a few texts."""
    tokenizer = new_tokenizer(family, 50)
    save(new_model(family, tokenizer, layers, seed=0), tokenizer, family, folder)

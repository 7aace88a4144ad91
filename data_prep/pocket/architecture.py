"""A pocket target: tokenizer, chat template, processor, random weights, and its Hugging Face folder.

Models are deep and narrow: one text layer has about a twelfth of the parameters.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, Qwen2Tokenizer

from data_prep.pocket.families import CONTEXT, pocket_family
from sage.inputs.processing import Processor
from sage.io.files import atomic_path, write_json
from sage.targets.families import family_of

VOCAB = 1280
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


def chat_template(family: str) -> str:
    """Returns the ChatML template with the family's placeholders."""
    text = pocket_family(family).media_text
    return TEMPLATE.replace("IMAGE", text["image"]).replace("VIDEO", text["video"])


def new_tokenizer(family: str, texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE tokenizer like Qwen2's on `texts`; it encodes any text."""
    special = [*CHAT_TOKENS, *pocket_family(family).media_tokens]
    base = Qwen2Tokenizer(model_max_length=CONTEXT)
    tokenizer = base.train_new_from_iterator(texts, VOCAB - len(special), show_progress=False)
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.chat_template = chat_template(family)
    tokenizer.padding_side = "left"
    return tokenizer


def _preprocessing(family: str) -> dict[str, Any]:
    return {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_rescale": True, "do_normalize": True,
            "rescale_factor": 1 / 255, "do_resize": True, "do_convert_rgb": True, "resample": 3,
            "processor_class": pocket_family(family).processors[2]}  # fmt: skip


def preprocessor_config(family: str) -> dict[str, Any]:
    """Returns the content of `preprocessor_config.json`."""
    own = pocket_family(family)
    return _preprocessing(family) | {"image_processor_type": own.processors[0]} | own.image_settings


def video_preprocessor_config(family: str) -> dict[str, Any]:
    """Returns the content of `video_preprocessor_config.json`, which is used with torchvision installed."""
    own = pocket_family(family)
    settings = {key: value for key, value in own.image_settings.items() if key not in ("image_grid_pinpoints", "do_pad")}
    return _preprocessing(family) | settings | {"video_processor_type": own.processors[1]}


def processor_config(family: str) -> dict[str, Any]:
    """Returns the content of `processor_config.json`, for the family's Hugging Face processor."""
    own = pocket_family(family)
    return {"processor_class": own.processors[2]} | own.processor_settings


def new_processor(family: str, tokenizer: PreTrainedTokenizerBase) -> Processor:
    """Returns the processor that the saved folder will have."""
    config = pocket_family(family).config(tokenizer, 1)
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        write_json(Path(scratch) / "preprocessor_config.json", preprocessor_config(family))
        return Processor.from_pretrained(scratch, family_of(config))


def new_model(family: str, tokenizer: PreTrainedTokenizerBase, layers: int, seed: int) -> PreTrainedModel:
    """Returns a model of a family with `layers` text layers and random weights."""
    own = pocket_family(family)
    torch.manual_seed(seed)
    model = own.model(tokenizer, layers)
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
    places = _places(len(old), layers, pocket_family(family).num_front_layers)
    state = {name: value for name, value in model.state_dict().items() if ".language_model.layers." not in name}
    deep.load_state_dict(state, strict=False)
    for place, layer in enumerate(new):
        if place in places:
            layer.load_state_dict(old[places[place]].state_dict())
        else:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return deep


def _places(before: int, after: int, front: int) -> dict[int, int]:
    """Returns the places of `before` layers among `after` ones, place -> layer; the first `front` stay where they are."""
    rest, room = before - front, after - front
    spread = {front + round((k + 0.5) * room / rest - 0.5): front + k for k in range(rest)}
    return {k: k for k in range(front)} | spread


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, family: str, folder: Path) -> None:
    """Writes weights (bfloat16; ValueError above `MAX_WEIGHT_BYTES`), configurations and tokenizer; replaces a folder."""
    with atomic_path(folder) as inside:
        rounded = type(model)(model.config)
        rounded.load_state_dict(model.state_dict())
        rounded.generation_config = model.generation_config
        rounded.to(torch.bfloat16).save_pretrained(inside)
        tokenizer.save_pretrained(inside)
        (inside / "chat_template.jinja").write_text(chat_template(family))
        write_json(inside / "preprocessor_config.json", preprocessor_config(family))
        write_json(inside / "video_preprocessor_config.json", video_preprocessor_config(family))
        write_json(inside / "processor_config.json", processor_config(family))
        (inside / WEIGHTS).chmod(0o644)
        if (inside / WEIGHTS).stat().st_size > MAX_WEIGHT_BYTES:
            raise ValueError(f"{folder}: weights of {(inside / WEIGHTS).stat().st_size} bytes, allowed: {MAX_WEIGHT_BYTES}")

"""A pocket target from scratch: a tokenizer, and random weights for the configuration of its family's shipped folder.

Models are deep and narrow: one text layer has about a twelfth of the parameters.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from data_prep.pocket import world
from sage.inputs.processing import Processor
from sage.io.folders import new_folder
from sage.targets.families import family_of
from sage.targets.families.qwen2_5_vl import PatchProjection

FAMILIES = {folder.name.removeprefix("pocket_"): folder for folder in sorted(Path(__file__).parent.glob("targets/pocket_*"))}
VOCAB, CONTEXT = 1280, 32768
WIDTH, INNER = 192, 512  # of the text layers
WEIGHTS, TEMPLATE = "model.safetensors", "chat_template.jinja"
SLOW_DECAY = -4.6  # softplus of it is 0.01; with transformers' initial 1, most linear layers forget within two tokens
MAX_WEIGHT_BYTES = 16 * 2**20  # the repository contains them
CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
VERSION_KEYS = ("architectures", "dtype", "transformers_version")  # of the files, not of the model


def new_tokenizer(family: str, num_texts: int) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE tokenizer like Qwen2's on the first training conversations; it encodes any text."""
    conversations = (world.sample("train", index).messages for index in range(num_texts))
    parts = (part for messages in conversations for message in messages for part in message["content"])
    texts = [part["text"] for part in parts if part["type"] == "text"]
    special = [CHAT_TOKENS[0], *AutoTokenizer.from_pretrained(FAMILIES[family]).extra_special_tokens]
    base = Qwen2Tokenizer(model_max_length=CONTEXT)
    tokenizer = base.train_new_from_iterator(texts, VOCAB - len(special), show_progress=False)
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.chat_template = (FAMILIES[family] / TEMPLATE).read_text()
    tokenizer.padding_side = "left"
    return tokenizer


def new_config(family: str, tokenizer: PreTrainedTokenizerBase, layers: int) -> PreTrainedConfig:
    """Returns the configuration of the family's shipped target with `layers` text layers and the ids of a tokenizer."""
    stored = json.loads((FAMILIES[family] / "config.json").read_text())
    tokens = AutoTokenizer.from_pretrained(FAMILIES[family])
    text = stored["text_config"] | {"vocab_size": len(tokenizer), "num_hidden_layers": layers}
    text.pop("layer_types", None)  # one per layer
    for settings in (stored, text):
        for key, value in settings.items():
            if key.endswith(("_token_id", "_token_index")):
                settings[key] = tokenizer.convert_tokens_to_ids(tokens.convert_ids_to_tokens(value))
    kept = {key: value for key, value in stored.items() if key not in VERSION_KEYS}
    return AutoConfig.for_model(**kept | {"text_config": text})


def new_processor(family: str, tokenizer: PreTrainedTokenizerBase) -> Processor:
    """Returns the processor that the saved folder will have."""
    images = AutoImageProcessor.from_pretrained(FAMILIES[family])
    return Processor(tokenizer, images, family_of(new_config(family, tokenizer, 1)))


class LinearPatchProjection(PatchProjection):
    """A patch projection without convolution, whose backward pass takes a tenth of a training step on the CPU."""

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.linear(patches)


def new_model(family: str, tokenizer: PreTrainedTokenizerBase, layers: int, seed: int) -> PreTrainedModel:
    """Returns a model of a family with `layers` text layers and random weights."""
    torch.manual_seed(seed)
    model: Any = AutoModelForImageTextToText.from_config(new_config(family, tokenizer, layers))
    for layer in model.model.language_model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.dt_bias.data.fill_(SLOW_DECAY)
    if family.startswith("qwen3"):
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

    The layers that deepstack features are added to stay in front, as do all layers of a model with linear ones; the others are
    spaced evenly between the new ones. The output projections of a new layer are zero, so that it is the identity; its other
    weights are random.
    """
    deep = new_model(family, tokenizer, layers, seed + 1)
    old, new = model.model.language_model.layers, deep.model.language_model.layers
    front = len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))
    if any(hasattr(layer, "linear_attn") for layer in old):
        front = len(old)
    rest, room = len(old) - front, layers - front
    sources = {k: k for k in range(front)}  # new layer -> old layer
    sources |= {front + round((k + 0.5) * room / rest - 0.5): front + k for k in range(rest)}
    state = {name: value for name, value in model.state_dict().items() if ".language_model.layers." not in name}
    deep.load_state_dict(state, strict=False)
    for number, layer in enumerate(new):
        if number in sources:
            layer.load_state_dict(old[sources[number]].state_dict())
        else:
            (layer.linear_attn.out_proj if hasattr(layer, "linear_attn") else layer.self_attn.o_proj).weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return deep


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, family: str, folder: Path) -> None:
    """Writes weights (bfloat16; ValueError above `MAX_WEIGHT_BYTES`), configurations and tokenizer; replaces a folder."""
    with new_folder(folder) as inside:
        rounded = type(model)(model.config)
        rounded.load_state_dict(model.state_dict())
        rounded.generation_config = model.generation_config
        rounded.to(torch.bfloat16).save_pretrained(inside)
        tokenizer.save_pretrained(inside)
        for name in (TEMPLATE, *PROCESSOR_FILES):
            shutil.copyfile(FAMILIES[family] / name, inside / name)
        if (inside / WEIGHTS).stat().st_size > MAX_WEIGHT_BYTES:
            raise ValueError(f"{folder}: weights of {(inside / WEIGHTS).stat().st_size} bytes, allowed: {MAX_WEIGHT_BYTES}")


def save_random(family: str, folder: Path, layers: int = 2) -> None:
    """Writes a target with random weights, and a tokenizer of a few texts."""
    tokenizer = new_tokenizer(family, 50)
    save(new_model(family, tokenizer, layers, seed=0), tokenizer, family, folder)

"""A byte-level processor for the tiny random targets, and messages with random images."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from support.models import IMAGE_TOKEN, VIDEO_TOKEN
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlavaOnevisionImageProcessorPil, PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

import sage
from sage.inputs.processing import Processor

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}[PLACE_{{ p.type }}]{% endif %}{% endfor %}{% endif %}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def make_processor(target: sage.Target) -> Processor:
    """A byte-level tokenizer whose placeholder ids are the tiny model's, and a small image processor."""
    family = target.family
    vocabulary = {f"<{i}>": i for i in range(64)}
    byte_level = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary |= {letter: 64 + i for i, letter in enumerate(byte_level)}
    for kind, token in (("image", IMAGE_TOKEN), ("video", VIDEO_TOKEN)):
        vocabulary[family.placeholders[kind]] = vocabulary.pop(f"<{token}>")
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(
        [AddedToken(token, special=True) for token in (family.placeholders["image"], family.placeholders["video"])]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<0>")
    places = f"{{{{ {{'image': '{family.placeholders['image']}', 'video': '{family.placeholders['video']}'}}[p.type] }}}}"
    template = TEMPLATE.replace("PLACE_{{ p.type }}", places)
    images: Any = (
        Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024})
        if family.model_type == "qwen2_5_vl"
        else LlavaOnevisionImageProcessorPil(
            size={"height": 8, "width": 8}, image_grid_pinpoints=target.model.config.image_grid_pinpoints
        )
    )
    return Processor(tokenizer, images, family, template)


def random_image(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = torch.randint(0, 255, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def user(*parts: Any) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return [{"role": "user", "content": content}]


def image_part(width: int, height: int) -> dict[str, Any]:
    return {"type": "image", "image": random_image(width, height)}

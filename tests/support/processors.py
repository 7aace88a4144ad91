"""A byte-level processor for the tiny random targets, and messages with random images."""

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


def byte_tokenizer_of(special: dict[str, int], eos: str | None = None) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per byte from 64 on, and special tokens of given ids below 64."""
    vocabulary = {f"<unused{i}>": i for i in set(range(64)) - set(special.values())} | special
    vocabulary |= {letter: 64 + i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, pad_token=min(vocabulary, key=vocabulary.__getitem__))


def make_processor(target: sage.Target) -> Processor:
    """A byte-level tokenizer whose placeholder ids are the tiny model's, and a small image processor."""
    family = target.family
    image, video = family.placeholders["image"], family.placeholders["video"]
    tokenizer = byte_tokenizer_of({image: IMAGE_TOKEN, video: VIDEO_TOKEN})
    template = TEMPLATE.replace("PLACE_{{ p.type }}", f"{{{{ {{'image': '{image}', 'video': '{video}'}}[p.type] }}}}")
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

"""Small processors and targets of both families: one token per byte, four visual tokens per image, published templates."""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import sage
from data_prep.batching.loader import StepLoader
from data_prep.conversation import Conversation
from data_prep.tools.regenerate import skipped_path
from sage.inputs.processing import Processor
from sage.targets.families.llava_onevision import LlavaOnevision
from sage.targets.families.qwen2_5_vl import Qwen2_5_VL
from train.config.schema import ObjectiveConfig
from train.distill.objective import Objective
from train.distill.student import HeadStudent
from train.distill.teacher import Teacher

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MEDIA_TOKENS = {
    "qwen2_5_vl": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "llava_onevision": ("<image>", "<video>"),
}
# Qwen2.5-VL adds a system prompt to a conversation without one.
QWEN_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' -%}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
# LLaVA-OneVision renders images first, a blank after the role, and nothing between turns.
LLAVA_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + ' ' -}}
{%- for part in message.content if part.type == 'image' -%}{{ '<image>' }}{%- endfor -%}
{%- for part in message.content if part.type == 'video' -%}{{ '<video>' }}{%- endfor -%}
{%- for part in message.content if part.type == 'text' -%}{{ '\\n' + part.text }}{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


def byte_tokenizer_of(special: dict[str, int], eos: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per byte from 64 on, and special tokens of given ids below 64."""
    vocabulary = {f"<unused{i}>": i for i in set(range(64)) - set(special.values())} | special
    vocabulary |= {letter: 64 + i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, pad_token=min(vocabulary, key=vocabulary.__getitem__))


def byte_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per byte, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, *MEDIA_TOKENS[family]]})
    return tokenizer


def make_processor(family: str) -> Processor:
    """Returns a processor: 16 x 16 images are 4 visual tokens (Qwen2.5-VL), 8 x 8 images 4 + 6 (LLaVA-OneVision)."""
    tokenizer = byte_tokenizer(family)
    if family == "qwen2_5_vl":
        ids = tokenizer.convert_tokens_to_ids(list(MEDIA_TOKENS[family]))
        names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
        config: Any = Qwen2_5_VLConfig(
            vision_config={"patch_size": 4, "spatial_merge_size": 2}, **dict(zip(names, ids, strict=True))
        )
        image_processor: Any = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=256, max_pixels=256)
        return Processor(tokenizer, image_processor, Qwen2_5_VL(config), QWEN_TEMPLATE)
    ids = tokenizer.convert_tokens_to_ids(list(MEDIA_TOKENS[family]))
    config = LlavaOnevisionConfig(
        vision_config={"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4},
        image_token_id=ids[0],
        video_token_id=ids[1],
        image_grid_pinpoints=[[8, 8]],
    )
    image_processor = LlavaOnevisionImageProcessorPil(
        size={"height": 8, "width": 8}, image_grid_pinpoints=[[8, 8]], image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return Processor(tokenizer, image_processor, LlavaOnevision(config), LLAVA_TEMPLATE)


def make_image(size: int = 16, colour: str = "red") -> Image.Image:
    """Returns a square of one colour."""
    return Image.new("RGB", (size, size), colour)


def make_noise(width: int = 64, height: int = 64, deviation: float = 90.0) -> Image.Image:
    """Returns a gray image of seeded noise; `Image.effect_noise` depends on what was drawn before in the process."""
    noise = np.random.default_rng(0).normal(128, deviation, (height, width))
    return Image.fromarray(noise.clip(0, 255).astype(np.uint8)).convert("RGB")


def user(*content: Any) -> dict[str, Any]:
    """Returns a user message of texts, images and videos (lists of images)."""
    return {"role": "user", "content": [_part(item) for item in content]}


def assistant(text: str) -> dict[str, Any]:
    """Returns an assistant message."""
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def _part(item: Any) -> dict[str, Any]:
    if isinstance(item, str):
        return {"type": "text", "text": item}
    return {"type": "video", "video": item} if isinstance(item, list) else {"type": "image", "image": item}


def save_images(folder: Path, *names: str) -> None:
    """Writes small PNGs or JPEGs of different colours."""
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        make_image(16, ("red", "green", "blue", "yellow")[i % 4]).save(folder / name)


def make_target(family: str) -> Any:
    """Returns a target of two layers with random weights and the processor of `make_processor`."""
    processor = make_processor(family)
    text = {
        "vocab_size": len(processor.tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "eos_token_id": processor.tokenizer.eos_token_id,
        "pad_token_id": processor.tokenizer.pad_token_id,
        "bos_token_id": processor.tokenizer.pad_token_id,
        "initializer_range": 0.3,
    }
    config = processor.family.config
    torch.manual_seed(0)
    if family == "qwen2_5_vl":
        text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
        vision |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16}
        vision |= {"fullatt_block_indexes": [0]}
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        ids = {name: getattr(config, name) for name in names}
        model: Any = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
        )
    else:
        vision = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "image_size": 8}
        vision |= {"num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "vision_use_head": False}
        ids = {"image_token_id": config.image_token_id, "video_token_id": config.video_token_id}
        model = LlavaOnevisionForConditionalGeneration(
            LlavaOnevisionConfig(
                text_config={"model_type": "qwen2", **text},
                vision_config=vision,
                image_grid_pinpoints=[[8, 8]],
                tie_word_embeddings=False,
                **ids,
            )
        )
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    return sage.Target(model, processor)


def train_step(target: Any, batch: dict[str, Any]) -> float:
    """Runs a distillation step of a new draft (teacher, draft, objective, gradient); returns the mean loss."""
    objective = Objective(ObjectiveConfig(ce_weight=0.1, feature_weight=1.0, chunk_tokens=64))
    student = HeadStudent(sage.new_draft(target, "eagle"), objective)
    teacher = Teacher(target)
    pairs = teacher(batch)
    loss, *_ = student(pairs, teacher.lm_head)
    mean = loss / pairs.mask.sum()
    mean.backward()
    gradients = [parameter.grad for parameter in student.parameters() if parameter.requires_grad]
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)
    return float(mean.detach())


def save_target(family: str, folder: Path) -> Path:
    """Saves the target of `make_target` as a target folder."""
    target = make_target(family)
    target.model.save_pretrained(folder)
    target.processor.tokenizer.chat_template = target.processor.chat_template
    target.processor.tokenizer.save_pretrained(folder)
    target.processor.image_processor.save_pretrained(folder)
    return folder


def png(colour: str = "red") -> bytes:
    """Returns the PNG file of `make_image`."""
    stream = io.BytesIO()
    make_image(16, colour).save(stream, "PNG")
    return stream.getvalue()


def share_turns(*values: str) -> list[dict[str, str]]:
    """Returns alternating turns in the ShareGPT layout."""
    return [{"from": "human" if i % 2 == 0 else "gpt", "value": value} for i, value in enumerate(values)]


class TwoTurnConversations:
    """Conversations with an image and two turns; number 3 is invalid."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def conversation(self, number: int) -> Conversation:
        question = user(make_image(8, ("red", "blue")[number % 2]), f"q{number}?")
        messages = [question, assistant("old"), user("more"), assistant("older")]
        return Conversation(f"c{number}", messages[: 3 if number == 3 else 4], "chats", meta={"index": number})


def take(loader: StepLoader, count: int) -> list[list[list[str]]]:
    """Returns the ids of the first steps: [step][micro-batch][example]."""
    steps = iter(loader)
    found = [[batch["ids"] for batch in step] for step in islice(steps, count)]
    steps.close()  # type: ignore[attr-defined]
    return found


def ids_by_step(steps: list[list[list[str]]]) -> list[set[str]]:
    """Returns the ids of each step."""
    return [{name for micro in step for name in micro} for step in steps]


def content(out: Path) -> dict[str, bytes]:
    """Returns the files that a regeneration has written, by the end of their names."""
    return {path.name.removeprefix(out.name): path.read_bytes() for path in (out, skipped_path(out)) if path.exists()}


def rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a JSON-lines file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

"""Batches of pocket conversations for training the pocket targets, without the image processor.

Every pocket image has 112 x 112 pixels and needs no resizing; a test compares the pixel inputs with those of the family's image
processor.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from data_prep.conversation import Conversation
from data_prep.pocket.palette import SIDE

Example = dict[str, Any]
NUM_VISUAL_TOKENS = {  # per image, per image of several, per video
    "qwen2_5_vl": {"image": 16, "images": 16, "video": 32},
    "llava_onevision": {"image": 36, "images": 17, "video": 17},
}


def pixels(images: list[Image.Image]) -> np.ndarray:
    """Returns images as float32 [n, 3, 112, 112] in -1..1."""
    array = np.stack([np.asarray(image) for image in images]).astype(np.float32)
    return array.transpose(0, 3, 1, 2) / 127.5 - 1


def patches(frames: np.ndarray) -> np.ndarray:
    """Returns the patches of one image or video for Qwen2.5-VL: [2 t, 3, 112, 112] to [t * 64, 3 * 2 * 14 * 14]."""
    times, side = len(frames) // 2, SIDE // 28
    cut = frames.reshape(times, 2, 3, side, 2, 14, side, 2, 14)
    return cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(times * 64, 1176)


class Encoder:
    """Turns a pocket conversation into ids, a loss mask and pixel inputs of one family."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, family: str) -> None:
        self.tokenizer, self.family = tokenizer, family
        self.cache: dict[str, list[int]] = {}

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _placeholders(self, kind: str, count: int) -> str:
        number = NUM_VISUAL_TOKENS[self.family]["images" if kind == "image" and count > 1 else kind]
        if self.family == "qwen2_5_vl":
            return f"<|vision_start|>{f'<|{kind}_pad|>' * number}<|vision_end|>"
        return f"<{kind}>" * number + "\n"

    def __call__(self, conversation: Conversation, until: int | None = None) -> Example:
        """Returns the example; with `until`, that of the messages before it and the header of an answer."""
        ids: list[int] = []
        mask: list[bool] = []
        images: list[Image.Image] = []
        kind = "none"
        for message in conversation.messages[:until]:
            found = [part for part in message["content"] if part["type"] != "text"]
            if found:
                kind = found[0]["type"]
                images = found[0]["video"] if kind == "video" else [part["image"] for part in found]
            placeholders = self._placeholders(kind, len(found)) * len(found) if found else ""
            self._add(ids, mask, message["role"], placeholders + message["content"][-1]["text"])
        if until is not None:
            ids += self._ids("<|im_start|>assistant\n")
        return {"ids": ids, "mask": mask, "kind": kind, "pixels": pixels(images) if images else None}

    def _add(self, ids: list[int], mask: list[bool], role: str, text: str) -> None:
        if role != "assistant":
            piece = self._ids(f"<|im_start|>{role}\n{text}<|im_end|>\n")
            ids += piece
            mask += [False] * len(piece)
            return
        opening, answer, end = self._ids("<|im_start|>assistant\n"), self._ids(text + "<|im_end|>"), self._ids("\n")
        ids += opening + answer + end
        mask += [False] * len(opening) + [True] * len(answer) + [False] * len(end)


def collate(
    examples: list[Example], family: str, tokenizer: PreTrainedTokenizerBase, is_left: bool = False
) -> dict[str, torch.Tensor]:
    """Pads on the right, or on the left with `is_left`, and stacks the examples; `loss_mask` [B, T] marks supervised tokens."""
    longest = max(len(example["ids"]) for example in examples)
    length = -(-longest // 8) * 8  # few different lengths: the matrix library prepares for each
    ids = torch.full((len(examples), length), int(tokenizer.pad_token_id))
    attention, loss = torch.zeros_like(ids), torch.zeros(ids.shape, dtype=torch.bool)
    for row, example in enumerate(examples):
        count = len(example["ids"])
        span = slice(length - count, length) if is_left else slice(0, count)
        ids[row, span] = torch.tensor(example["ids"])
        attention[row, span] = 1
        if not is_left:
            loss[row, span] = torch.tensor(example["mask"])
    batch = {"input_ids": ids, "attention_mask": attention, "loss_mask": loss}
    return batch | (_qwen_pixels(examples, ids, tokenizer) if family == "qwen2_5_vl" else _llava_pixels(examples))


def _qwen_pixels(examples: list[Example], ids: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> dict[str, torch.Tensor]:
    image_id, video_id = (tokenizer.convert_tokens_to_ids(name) for name in ("<|image_pad|>", "<|video_pad|>"))
    fields = {"mm_token_type_ids": (ids == image_id).int() + 2 * (ids == video_id).int()}
    image_pixels = [image for e in examples if e["kind"] == "image" for image in e["pixels"]]
    videos = [e["pixels"] for e in examples if e["kind"] == "video"]
    if image_pixels:
        fields["pixel_values"] = torch.from_numpy(np.concatenate([patches(np.stack([p, p])) for p in image_pixels]))
        fields["image_grid_thw"] = torch.tensor([[1, 8, 8]] * len(image_pixels))
    if videos:
        fields["pixel_values_videos"] = torch.from_numpy(np.concatenate([patches(video) for video in videos]))
        fields["video_grid_thw"] = torch.tensor([[len(video) // 2, 8, 8] for video in videos])
        fields["second_per_grid_ts"] = torch.ones(len(videos))
    return fields


def _llava_pixels(examples: list[Example]) -> dict[str, torch.Tensor]:
    fields = {}
    image_pixels = [e["pixels"] for e in examples if e["kind"] == "image"]
    videos = [e["pixels"] for e in examples if e["kind"] == "video"]
    if image_pixels:
        images = torch.from_numpy(np.concatenate(image_pixels))
        fields["pixel_values"] = torch.stack([images, images], 1)  # base view and its only tile, which are the same here
        fields["image_sizes"] = torch.tensor([[SIDE, SIDE]] * len(images))
        fields["batch_num_images"] = torch.tensor([len(still) for still in image_pixels])
    if videos:
        fields["pixel_values_videos"] = torch.from_numpy(np.stack(videos))
    return fields

"""Batches of pocket conversations for training the pocket targets, made fast.

Every pocket picture is 112 x 112, so its pixel inputs need no resizing; a test compares them with the family's own
image processor.
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
TOKENS = {
    "qwen2_5_vl": {"image": 16, "images": 16, "video": 32},
    "llava_onevision": {"image": 36, "images": 17, "video": 17},
}


def pixels(pictures: list[Image.Image]) -> np.ndarray:
    """[n, 3, 112, 112] float32 in -1..1."""
    array = np.stack([np.asarray(picture) for picture in pictures]).astype(np.float32)
    return array.transpose(0, 3, 1, 2) / 127.5 - 1


def patches(frames: np.ndarray) -> np.ndarray:
    """Qwen2.5-VL's patches of one picture or clip: [2 t, 3, 112, 112] to [t * 64, 3 * 2 * 14 * 14]."""
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

    def _marks(self, kind: str, count: int) -> str:
        number = TOKENS[self.family]["images" if kind == "image" and count > 1 else kind]
        if self.family == "qwen2_5_vl":
            return f"<|vision_start|>{f'<|{kind}_pad|>' * number}<|vision_end|>"
        return f"<{kind}>" * number + "\n"

    def __call__(self, conversation: Conversation, until: int | None = None) -> Example:
        """The example; with `until`, only the messages before it and the opening of an answer."""
        ids: list[int] = []
        mask: list[bool] = []
        pictures: list[Image.Image] = []
        kind = "none"
        for message in conversation.messages[:until]:
            found = [part for part in message["content"] if part["type"] != "text"]
            if found:
                kind = found[0]["type"]
                pictures = found[0]["video"] if kind == "video" else [part["image"] for part in found]
            marks = self._marks(kind, len(found)) * len(found) if found else ""
            self._add(ids, mask, message["role"], marks + message["content"][-1]["text"])
        if until is not None:
            ids += self._ids("<|im_start|>assistant\n")
        return {"ids": ids, "mask": mask, "kind": kind, "pixels": pixels(pictures) if pictures else None}

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
    examples: list[Example], family: str, tokenizer: PreTrainedTokenizerBase, left: bool = False
) -> dict[str, torch.Tensor]:
    """Pad (on the right unless `left`) and stack; `loss_mask` [B, T] marks supervised tokens."""
    longest = max(len(example["ids"]) for example in examples)
    length = -(-longest // 8) * 8  # few different lengths: the matrix library keeps a plan for each
    ids = torch.full((len(examples), length), int(tokenizer.pad_token_id))
    attention, loss = torch.zeros_like(ids), torch.zeros(ids.shape, dtype=torch.bool)
    for row, example in enumerate(examples):
        count = len(example["ids"])
        span = slice(length - count, length) if left else slice(0, count)
        ids[row, span] = torch.tensor(example["ids"])
        attention[row, span] = 1
        if not left:
            loss[row, span] = torch.tensor(example["mask"])
    batch = {"input_ids": ids, "attention_mask": attention, "loss_mask": loss}
    return batch | (_qwen_pixels(examples, ids, tokenizer) if family == "qwen2_5_vl" else _llava_pixels(examples))


def _qwen_pixels(examples: list[Example], ids: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> dict[str, torch.Tensor]:
    image, video = (tokenizer.convert_tokens_to_ids(name) for name in ("<|image_pad|>", "<|video_pad|>"))
    fields = {"mm_token_type_ids": (ids == image).int() + 2 * (ids == video).int()}
    stills = [picture for e in examples if e["kind"] == "image" for picture in e["pixels"]]
    clips = [e["pixels"] for e in examples if e["kind"] == "video"]
    if stills:
        fields["pixel_values"] = torch.from_numpy(np.concatenate([patches(np.stack([p, p])) for p in stills]))
        fields["image_grid_thw"] = torch.tensor([[1, 8, 8]] * len(stills))
    if clips:
        fields["pixel_values_videos"] = torch.from_numpy(np.concatenate([patches(clip) for clip in clips]))
        fields["video_grid_thw"] = torch.tensor([[len(clip) // 2, 8, 8] for clip in clips])
        fields["second_per_grid_ts"] = torch.ones(len(clips))
    return fields


def _llava_pixels(examples: list[Example]) -> dict[str, torch.Tensor]:
    fields = {}
    stills = [e["pixels"] for e in examples if e["kind"] == "image"]
    clips = [e["pixels"] for e in examples if e["kind"] == "video"]
    if stills:
        pictures = torch.from_numpy(np.concatenate(stills))
        fields["pixel_values"] = torch.stack([pictures, pictures], 1)  # base view and the one tile, here the same
        fields["image_sizes"] = torch.tensor([[SIDE, SIDE]] * len(pictures))
        fields["batch_num_images"] = torch.tensor([len(still) for still in stills])
    if clips:
        fields["pixel_values_videos"] = torch.from_numpy(np.stack(clips))
    return fields

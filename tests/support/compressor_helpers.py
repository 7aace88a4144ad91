"""Conversations with images and videos as tensors, and a draft per compressor."""

from types import SimpleNamespace
from typing import Any

import torch
from support.models import EOS, IMAGE_TOKEN, VIDEO_TOKEN, random_draft, token_fields
from torch import Tensor

import sage
from sage.drafts.head import DraftHead
from sage.inputs.processing import Processor

COMPRESSORS: dict[str, dict[str, Any]] = {
    "prune": {"kind": "prune", "ratio": 3},
    "pool": {"kind": "pool", "ratio": 2},
    "conv": {"kind": "conv", "ratio": 3},
    "resampler": {"kind": "resampler", "queries": 2},
    "text_only": {"kind": "text_only"},
    "weighted": {"kind": "weighted", "ratio": 2},
    "concat": {"kind": "concat", "ratio": 3, "conv_ratio": 2, "queries": 2},
    "select": {"kind": "select", "ratio": 3, "conv_ratio": 2, "queries": 2, "temperature": 1.0},
}


def words(count: int, seed: int) -> list[int]:
    return torch.randint(2, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# Lists are text, tuples are answers.
CONVERSATIONS: dict[str, list[Any]] = {
    "image": [words(3, 1), "image", words(4, 2), [EOS], words(2, 3), (*words(4, 4), EOS)],
    "no end of turn": [words(3, 1), "image", words(5, 2), tuple(words(5, 4))],
    "text only": [words(6, 5), [EOS], words(2, 3), (*words(5, 6), EOS)],
    "two images": [words(2, 1), "image", words(2, 2), "image", words(3, 7), [EOS], words(2, 3), (*words(4, 8), EOS)],
    "video": [words(2, 1), "video", words(4, 9), [EOS], words(2, 3), (*words(4, 10), EOS)],
    "two turns": [
        *[words(2, 1), "image", words(3, 2), [EOS], words(2, 3), (*words(4, 4), EOS)],
        *[words(2, 11), "video", words(4, 12), [EOS], words(2, 3), (*words(5, 13), EOS)],
    ],
}


def draft_with(target: sage.Target, kind: str, compressor: dict[str, Any] | None, seed: int = 0) -> DraftHead:
    head: DraftHead = random_draft(target, kind, seed=seed, compressor=compressor).eval()
    return head


def example(target: sage.Target, pieces: list[Any]) -> dict[str, Tensor]:
    ids: list[int] = []
    mask: list[int] = []
    for piece in pieces:
        ids += _placeholders(target, piece, pieces.count("image")) if isinstance(piece, str) else piece
        mask += [int(isinstance(piece, tuple))] * (len(ids) - len(mask))
    pixels = _pixels(target, pieces.count("image"), pieces.count("video"))
    return {**token_fields(target, torch.tensor([ids])), **pixels, "loss_mask": torch.tensor([mask])}


def prompt_of(target: sage.Target, full: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """Returns the inputs of the first `length` tokens; an image begins with its first placeholder."""
    ids = full["input_ids"][:, :length]
    images, videos = (_runs(ids[0] == token) for token in (IMAGE_TOKEN, VIDEO_TOKEN))
    return {**token_fields(target, ids), **_pixels(target, images, videos)}


def together(target: sage.Target, examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    tokens = {key for key, value in examples[0].items() if value.shape == examples[0]["input_ids"].shape}
    single = [{key: value[0] if key in tokens else value for key, value in example.items()} for example in examples]
    processor = Processor(SimpleNamespace(pad_token_id=0), None, target.family)
    batch: dict[str, Tensor] = processor.collate(single)
    return batch


def starts_of_answers(loss_mask: Tensor) -> list[int]:
    row = loss_mask[0].tolist()
    return [place for place, is_answer in enumerate(row) if is_answer and not row[place - 1]]


def _runs(mask: Tensor) -> int:
    return int((mask & ~torch.nn.functional.pad(mask, (1, -1))).sum())


def _placeholders(target: sage.Target, piece: str, images: int) -> list[int]:
    token = VIDEO_TOKEN if piece == "video" else IMAGE_TOKEN
    if target.family.model_type == "qwen2_5_vl":
        return [62, *[token] * (8 if piece == "video" else 4), 63]
    return [token] * (5 if piece == "video" or images > 1 else 10)  # only a single image has tiles


def _pixels(target: sage.Target, images: int, videos: int) -> dict[str, Tensor]:
    """Returns pixel inputs that depend only on the index of an image."""
    generator = torch.Generator().manual_seed(7)
    found: dict[str, Tensor] = {}
    if target.family.model_type == "qwen2_5_vl":
        values = torch.randn(64, 3 * 2 * 4 * 4, generator=generator)
        if images:
            found |= {"pixel_values": values[: 16 * images], "image_grid_thw": torch.tensor([[1, 4, 4]] * images)}
        if videos:
            found |= {"pixel_values_videos": values[: 32 * videos], "video_grid_thw": torch.tensor([[2, 4, 4]] * videos)}
        return found
    values = torch.randn(4, 4, 3, 8, 8, generator=generator)
    if images:
        sizes = torch.tensor([[8, 8]] * images)
        found |= {"pixel_values": values[:images, :2], "image_sizes": sizes, "batch_num_images": torch.tensor([images])}
    if videos:
        found |= {"pixel_values_videos": values[:videos]}
    return found

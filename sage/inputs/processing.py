"""Chat messages and pictures -> model inputs, for every family, with or without torchvision.

Owns: rendering the chat template, opening pictures, expanding placeholders, tokenising piece by piece, batching.
Does not own: what a family's pixels look like (sage.targets.family) or which text is supervised (data_prep.chat).

transformers builds these families' processors only where torchvision is installed; this one needs the tokenizer and the
image processor alone and yields the same fields.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, BatchFeature

from sage.inputs.media import DEFAULT_FPS, open_clip_part, open_picture, source_of

if TYPE_CHECKING:
    from sage.targets.family import Family, Inputs

Messages = list[dict[str, Any]]
Segment = tuple[str, bool]


class TemplateFault(ValueError):
    """A chat template that is missing or cannot be worked with: the target's fault, not that of what it was to render."""


class Processor:
    """The target's own tokenizer, template and image processor behind one call.

    Args:
        tokenizer: the target's tokenizer.
        image_processor: the target's image processor.
        family: the target's family.
        chat_template: overrides the tokenizer's own template.
    """

    def __init__(self, tokenizer: Any, image_processor: Any, family: Family, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.family = family
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)

    @classmethod
    def from_pretrained(cls, path: str, family: Family) -> Processor:
        """Loads tokenizer and image processor from a folder or hub id."""
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        return cls(tokenizer, AutoImageProcessor.from_pretrained(path, trust_remote_code=False), family)

    @classmethod
    def wrap(cls, processor: Any, family: Family) -> Processor:
        """Takes a Hugging Face processor in hand apart; one of ours is returned as it is."""
        if isinstance(processor, cls):
            return processor
        return cls(processor.tokenizer, processor.image_processor, family, getattr(processor, "chat_template", None))

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes what `from_pretrained` reads."""
        self.tokenizer.chat_template = self.chat_template
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)

    # -- one conversation ---------------------------------------------------------------------------------------------

    def render(self, messages: Messages, add_generation_prompt: bool) -> str:
        """The chat template's text for these messages, one placeholder per picture."""
        if not self.chat_template:
            raise TemplateFault("target: its tokenizer has no chat template; add chat_template.jinja to the target folder")
        return self.tokenizer.apply_chat_template(
            messages, chat_template=self.chat_template, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def prepare(self, messages: Messages) -> BatchFeature:
        """Messages -> inputs of one prompt [1, T], ending where the assistant begins.

        Raises:
            ValueError: nothing to answer, or a picture that cannot be read.
        """
        if not any(_text(message).strip() or _parts(message, "image", "video") for message in messages):
            raise ValueError("prompt: empty; give the target a question or a picture")
        images, videos, fps = open_media(messages)
        example = self.encode([(self.render(messages, True), False)], images, videos, fps)
        del example["loss_mask"]
        return BatchFeature(self.collate([example]))

    def encode(
        self,
        segments: list[Segment],
        images: list[Image.Image] | None = None,
        videos: list[list[Image.Image]] | None = None,
        fps: list[float] | None = None,
    ) -> Inputs:
        """Tokenises pieces of a rendered chat and attaches the pictures.

        Each piece is tokenised on its own, so an answer gets the very tokens generation would emit after its prompt.

        Args:
            segments: (text, supervised) in order.
            images: pictures in the order of their placeholders.
            videos: clips as lists of frames, likewise.
            fps: frames per second of each clip; None is `DEFAULT_FPS` for all.

        Returns:
            input_ids [T], loss_mask [T] bool, the family's per-token inputs [T] and its stacked pixel inputs.

        Raises:
            ValueError: placeholders and pictures, or clips and values of `fps`, differ in number.
        """
        counts, pixels = self._pixels(images or [], videos or [], fps)
        pieces = [(self._expand(text, counts), supervised) for text, supervised in segments]
        for token, left in counts.items():
            if left:
                raise ValueError(f"prompt: {len(left)} more picture(s) or video(s) than {token!r} placeholders in the text")
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in pieces]
        input_ids = torch.tensor([token for piece in ids for token in piece], dtype=torch.long)
        mask = [supervised for piece, (_, supervised) in zip(ids, pieces, strict=True) for _ in piece]
        loss_mask = torch.tensor(mask, dtype=torch.bool)
        return {"input_ids": input_ids, "loss_mask": loss_mask, **self.family.token_inputs(input_ids), **pixels}

    def _pixels(
        self, images: list[Image.Image], videos: list[list[Image.Image]], fps: list[float] | None
    ) -> tuple[dict[str, list[int]], Inputs]:
        counts: dict[str, list[int]] = {self.family.image_token: [], self.family.video_token: []}
        pixels: Inputs = {}
        if images:
            found, counts[self.family.image_token] = self.family.pictures(self.image_processor, images)
            pixels |= found
        fps = [DEFAULT_FPS] * len(videos) if fps is None else fps
        if len(fps) != len(videos):
            raise ValueError(f"video: {len(videos)} clip(s) and {len(fps)} value(s) of fps; give one for each clip")
        if videos:
            found, counts[self.family.video_token] = self.family.clips(self.image_processor, videos, fps)
            pixels |= found
        return counts, pixels

    def _expand(self, text: str, counts: dict[str, list[int]]) -> str:
        """Repeats each placeholder by its number of visual tokens, consuming `counts` in reading order."""

        def repeat(match: re.Match[str]) -> str:
            token = match.group()
            if not counts[token]:
                raise ValueError(f"prompt: a {token!r} placeholder in the text has no picture or video")
            return token * counts[token].pop(0)

        return re.sub("|".join(map(re.escape, counts)), repeat, text)

    # -- batches ------------------------------------------------------------------------------------------------------

    def collate(self, examples: list[Inputs]) -> Inputs:
        """Right-pads token fields to the longest and stacks pixel fields; adds attention_mask [B, T]."""
        keys = list(dict.fromkeys(key for example in examples for key in example))
        batch = {"attention_mask": _pad([torch.ones_like(example["input_ids"]) for example in examples], 0)}
        for key in keys:
            values = [example[key] for example in examples if example.get(key) is not None]
            if not isinstance(values[0], Tensor):
                batch[key] = values
            elif key in self.family.pixel_keys:
                batch[key] = self.family.stack(key, values)
            else:
                batch[key] = _pad(values, self._pad_id if key == "input_ids" else 0)
        return batch

    @property
    def _pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return 0 if pad is None else pad


def open_media(
    messages: Messages, num_frames: int | None = None, allow_urls: bool = True
) -> tuple[list[Image.Image], list[list[Image.Image]], list[float]]:
    """Opens every picture and clip of the messages, in reading order; prompts and training examples come through here.

    Args:
        num_frames: at most so many frames of each clip; None as in `sage.inputs.media.open_clip`.
        allow_urls: fetch pictures that are URLs.

    Returns:
        pictures (RGB, EXIF rotation applied), clips as frames, and each clip's frames per second.

    Raises:
        ValueError: a file is missing or not a picture; names it.
    """
    parts = [part for message in messages for part in _parts(message, "image", "video")]
    images = [open_picture(source_of(part, "image"), allow_urls) for part in parts if part["type"] == "image"]
    clips = [open_clip_part(part, num_frames) for part in parts if part["type"] == "video"]
    return images, [clip.frames for clip in clips], [clip.fps for clip in clips]


def _parts(message: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    content = message.get("content", "")
    return [] if isinstance(content, str) else [part for part in content if part.get("type") in kinds]


def _text(message: dict[str, Any]) -> str:
    content = message.get("content", "")
    return content if isinstance(content, str) else "".join(part["text"] for part in _parts(message, "text"))


def _pad(values: list[Tensor], fill: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)

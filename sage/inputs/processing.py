"""Chat messages, images and videos -> model inputs, for every family, with or without torchvision.

The processors of transformers for these families need torchvision. This one needs the tokenizer and the image processor only,
and returns the same fields. Shapes: B batch, T tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, BatchFeature

# `transformers.AutoImageProcessor` requires torchvision in transformers 5.17; the same class from here does not.
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils import cached_file

from sage.inputs.format import InputFormat, Inputs
from sage.inputs.media import DEFAULT_FPS, OpenedMedia, open_media
from sage.inputs.messages import Messages, as_parts, check_messages, escape, parts_of, text_of
from sage.inputs.video import Size, VideoSize

TEMPLATE_FILE = "chat_template.json"
BLANK = "\u2581"  # of SentencePiece
Segment = tuple[str | tuple[int, ...], bool]  # text or token ids, is supervised
NOT_RENDERED = ("tools", "token_ids", "unfinished", "weight")  # keys of a message that are no fields of a chat template
MARKUP = re.compile("think|tool")  # special tokens that templates write within messages


class TemplateFault(ValueError):
    """The target's chat template is missing or unusable; an error of the target, not of the messages."""


class Processor:
    """The target's own tokenizer, image processor and template behind one call.

    Args:
        image_processor: None for a family without images.
        chat_template: in place of the tokenizer's.
        end_token_ids: ids besides the tokenizer's EOS that end an answer.

    Attributes:
        thinking: whether a hybrid model thinks before it answers; None: as the family does by default.
    """

    thinking: bool | None = None

    def __init__(
        self,
        tokenizer: Any,
        image_processor: Any,
        family: InputFormat,
        chat_template: str | None = None,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.family = family
        self.chat_template = family.chat_template(chat_template or getattr(tokenizer, "chat_template", None))
        self.end_token_ids = tuple(end_token_ids)

    @classmethod
    def from_pretrained(cls, path: str, family: InputFormat, end_token_ids: Sequence[int] = ()) -> Processor:
        """Loads tokenizer and image processor from a folder or hub id."""
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        images = AutoImageProcessor.from_pretrained(path, trust_remote_code=False) if family.placeholders else None
        template = None
        if not getattr(tokenizer, "chat_template", None):  # older checkpoints keep it beside the tokenizer's files
            absent = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
            file = cached_file(path, TEMPLATE_FILE, **absent)
            template = None if file is None else json.loads(Path(file).read_text()).get("chat_template")
        return cls(tokenizer, images, family, template if isinstance(template, str) else None, end_token_ids)

    @classmethod
    def wrap(cls, processor: Any, family: InputFormat, end_token_ids: Sequence[int] = ()) -> Processor:
        """Wraps a tokenizer, or the parts of a Hugging Face processor; returns a `Processor` unchanged."""
        if isinstance(processor, cls):
            return processor
        tokenizer, images = getattr(processor, "tokenizer", processor), getattr(processor, "image_processor", None)
        return cls(tokenizer, images, family, getattr(processor, "chat_template", None), end_token_ids)

    @property
    def end_texts(self) -> list[str]:
        """The texts of the tokens that end an answer."""
        ends = [self.tokenizer.eos_token, *self.tokenizer.convert_ids_to_tokens(list(self.end_token_ids))]
        return [text for text in dict.fromkeys(ends) if text]

    def save_pretrained(self, folder: str | Path) -> None:
        """Saves tokenizer, chat template and image processor for `from_pretrained`."""
        self.tokenizer.chat_template = self.chat_template
        self.tokenizer.save_pretrained(folder)
        if self.image_processor is not None:
            self.image_processor.save_pretrained(folder)

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Further arguments of the chat template, which a server of the target needs as well."""
        arguments = self.family.template_arguments
        return arguments if self.thinking is None else dict.fromkeys(arguments, self.thinking)

    @contextmanager
    def thinks(self, thinking: bool | None) -> Iterator[None]:
        """Renders with another `thinking`."""
        before, self.thinking = self.thinking, thinking
        try:
            yield
        finally:
            self.thinking = before

    def render(self, messages: Messages, add_generation_prompt: bool, /, **arguments: Any) -> str:
        """Renders the chat template (TemplateFault if there is none), with one placeholder per image or video.

        The first message may have `tools`; `arguments` are further ones of the template. Raises ValueError if it refuses them.
        """
        if not self.chat_template:
            raise TemplateFault("target: its tokenizer has no chat template; add chat_template.jinja to the target folder")
        content = text_of if self.family.wants_text else as_parts
        tools = messages[0].get("tools") if messages else None
        plain = [{key: value for key, value in message.items() if key not in NOT_RENDERED} for message in messages]
        try:
            return self.tokenizer.apply_chat_template(
                [message | {"content": content(message)} for message in plain],
                tools=tools,
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_arguments | arguments,
            )
        except (TemplateError, TypeError, RecursionError) as error:
            raise ValueError(f"the target's chat template refuses the messages: {error}") from error

    def prepare(self, messages: Messages, media: OpenedMedia | None = None, /, **arguments: Any) -> BatchFeature:
        """Messages -> inputs [1, T] up to the assistant's turn; `arguments` are further ones of the chat template.

        Raises ValueError: an empty prompt, invalid Unicode, or media that cannot be read.

        Args:
            media: of `open_media`, to open them with other arguments than here.
        """
        check_messages(messages)
        if not any(text_of(message).strip() or parts_of(message, "image", "video") for message in messages):
            raise ValueError("prompt: empty; give a question or an image")
        images, videos, fps = open_media(messages) if media is None else media
        example = self.encode(self._prompt(messages, **arguments), images, videos, fps)
        del example["loss_mask"]
        return BatchFeature(self.collate([example]))

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Returns the ids of `prepare` with a single placeholder for each image and video, as engines read them."""
        [ids] = self._tokenize([self._prompt(messages)])
        return [token for piece in ids for token in piece]

    def _prompt(self, messages: Messages, /, **arguments: Any) -> list[Segment]:
        """Renders messages up to the assistant's turn, cut where a message quotes a special token."""
        messages, separator = escape(messages, self.quotable)
        text = self.render(messages, True, **arguments)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt: invalid Unicode {text[error.start]!a}; give text in UTF-8") from error
        return [(piece, False) for piece in text.split(separator) if piece]

    def encode(
        self,
        segments: list[Segment],
        images: list[Image.Image] | None = None,
        videos: list[list[Image.Image]] | None = None,
        fps: list[float] | None = None,
    ) -> Inputs:
        """Tokenizes segments of a rendered chat and encodes images and videos.

        Each segment is tokenized separately, so that an answer has the tokens that generation would emit after its prompt.

        Args:
            segments: (text or token ids, is_supervised) in order.
            images, videos: in the order of their placeholders, a video as its frames; ValueError for another number of them.
            fps: frames per second of each video; None = `DEFAULT_FPS` for all.

        Returns:
            input_ids [T], loss_mask [T] bool, the family's per-token inputs [T] and its pixel inputs.
        """
        images, videos = images or [], videos or []
        fps = [DEFAULT_FPS] * len(videos) if fps is None else fps
        sizes = [VideoSize(len(frames), *frames[0].size) for frames in videos]
        segments, order = self._with_texts(segments, [image.size for image in images], sizes, fps)
        pixels = self.family.encode_media(self.image_processor, order, images, videos, fps) if order else {}
        [ids] = self._tokenize([segments])
        input_ids = torch.tensor([token for piece in ids for token in piece], dtype=torch.long)
        mask = [supervised for piece, (_, supervised) in zip(ids, segments, strict=True) for _ in piece]
        loss_mask = torch.tensor(mask, dtype=torch.bool)
        return {"input_ids": input_ids, "loss_mask": loss_mask, **self.family.token_inputs(input_ids), **pixels}

    def _with_texts(
        self, segments: list[Segment], images: Sequence[Size], videos: Sequence[VideoSize], fps: list[float]
    ) -> tuple[list[Segment], list[str]]:
        """Replaces the placeholders by the texts for images and videos of these sizes; returns also the `_media_order`."""
        order = self._media_order(segments, images, videos, fps)
        left = iter(self.family.media_texts(self.image_processor, order, images, videos, fps))
        if order:
            segments = [
                (self._placeholders.sub(lambda _: next(left), text) if isinstance(text, str) else text, is_answer)
                for text, is_answer in segments
            ]
        return segments, order

    def _media_order(
        self, segments: list[Segment], images: Sequence[Any], videos: Sequence[Any], fps: Sequence[float]
    ) -> list[str]:
        """Returns "image" or "video" for each placeholder; ValueError if there are not as many images, videos and rates."""
        if len(fps) != len(videos):
            raise ValueError(f"video: {len(videos)} video(s) and {len(fps)} value(s) of fps; give one for each video")
        kinds = {token: kind for kind, token in self.family.placeholders.items()}
        texts = [text for text, _ in segments if isinstance(text, str)] if kinds else []
        order = [kinds[token] for text in texts for token in self._placeholders.findall(text)]
        for kind, media in (("image", images), ("video", videos)):
            token, spare = self.family.placeholders.get(kind), len(media) - order.count(kind)
            if spare > 0 and token is not None:
                raise ValueError(f"prompt: {spare} more image(s) or video(s) than {token!r} placeholders in the text")
            if spare < 0:
                raise ValueError(f"prompt: a {token!r} placeholder in the text has no image or video")
        return order

    @property
    def _placeholders(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.family.placeholders.values())))

    def _tokenize(self, chats: Sequence[Sequence[Segment]]) -> list[list[list[int]]]:
        """Tokenizes the segments of chats in one call; the first and every answer as if it was a text of its own.

        A SentencePiece tokenizer puts a blank before a text. A generated answer begins with one, the other segments do not.
        """
        given = [text for chat in chats for text, _ in chat]
        texts = [text if isinstance(text, str) else "" for text in given]
        before = [prefix for chat in chats for prefix in self._prefixes(chat)]
        joined = self._ids([prefix + text for prefix, text in zip(before, texts, strict=True)])
        alone = dict(zip(prefixes, self._ids(prefixes), strict=True)) if (prefixes := sorted(set(before) - {""})) else {}
        pieces = iter(
            self._without_prefix(text, ids, alone.get(prefix, [])) if isinstance(text, str) else list(text)
            for prefix, text, ids in zip(before, given, joined, strict=True)
        )
        tokenized = [list(islice(pieces, len(chat))) for chat in chats]
        for chat, ids in zip(chats, tokenized, strict=True):
            if self._bos_ids and not str(chat[0][0]).startswith(self.tokenizer.bos_token):
                ids[0] = [*self._bos_ids, *ids[0]]
        return tokenized

    def _prefixes(self, chat: Sequence[Segment]) -> list[str]:
        """Returns, for each segment that is tokenized within its chat, the special token before it or a line break; else ""."""
        if not self.prepends_blank:
            return [""] * len(chat)
        prefixes = [""]
        for (before, was_supervised), (_, is_supervised) in pairwise(chat):
            is_answer = is_supervised and not was_supervised
            before = before if isinstance(before, str) else ""
            prefixes.append("" if is_answer else next((token for token in self._added if before.endswith(token)), "\n"))
        return prefixes

    def _without_prefix(self, text: str, ids: list[int], prefix: list[int]) -> list[int]:
        return ids[len(prefix) :] if ids[: len(prefix)] == prefix else self.tokens_of(text)

    @cached_property
    def prepends_blank(self) -> bool:
        """Whether the tokenizer puts a blank before every text, as SentencePiece does."""
        return bool(self.tokenizer.tokenize("a")[0].startswith(BLANK))

    @cached_property
    def _added(self) -> list[str]:
        """The added tokens, the longest first."""
        return sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)

    @cached_property
    def quotable(self) -> re.Pattern[str]:
        """Matches the tokens that end or begin a turn or stand for media, which are text where a message quotes them.

        The other added tokens (thoughts, tool calls, boxes) are written by the target itself.
        """
        special, template = set(self.tokenizer.all_special_tokens), self.chat_template or ""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        special |= {str(token) for token in added if token.special}
        texts = {text for text in special if text in template and not MARKUP.search(text)} | set(self.end_texts)
        texts |= {*self.family.placeholders.values(), *self.family.slot_texts.values(), self.tokenizer.bos_token}
        texts = {text for text in texts if text and len(text) > 1}
        return re.compile("|".join(sorted(map(re.escape, texts), key=len, reverse=True)) or "(?!)")

    def _ids(self, texts: list[str]) -> list[list[int]]:
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}  # no warning of a long prompt
        return self.tokenizer(texts, **options)["input_ids"]

    @cached_property
    def _bos_ids(self) -> list[int]:
        """The BOS token if the tokenizer begins every text with it."""
        bos = self.tokenizer.bos_token_id
        return [bos] if bos is not None and self.tokenizer("")["input_ids"][:1] == [bos] else []

    def with_media_texts(
        self, segments: list[Segment], images: list[Size], videos: list[VideoSize], fps: list[float]
    ) -> tuple[list[Segment], list[int]]:
        """Replaces the placeholders of `encode`'s segments by the texts for images and videos of these sizes.

        Returns the segments, with one token in place of a run of visual ones, and the number of tokens that each is short of.
        """
        segments, order = self._with_texts(segments, images, videos, fps)
        shortened, omitted = list(segments), [0] * len(segments)
        for i, (text, is_answer) in enumerate(segments):
            if isinstance(text, str) and order:
                shortened[i] = (self._slot_runs.sub(lambda run: run[1], text), is_answer)
                omitted[i] = sum(len(run[0]) // len(run[1]) - 1 for run in self._slot_runs.finditer(text))
        return shortened, omitted

    def tokens_of(self, text: str) -> list[int]:
        """Returns the ids of a text without special tokens around it."""
        return self._ids([text])[0]

    def answer_of(self, ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Returns the text of generated ids without the token that ends them, and the ids if the text has others."""
        ends = {self.tokenizer.eos_token_id, *self.end_token_ids}
        kept = tuple(ids[:-1] if len(ids) and ids[-1] in ends else ids)
        text = self.tokenizer.decode(kept, skip_special_tokens=False)
        is_same = self.tokens_of(text) == list(kept) and not self.quotable.search(text)
        return text, () if is_same else kept

    def count_tokens(self, chats: Sequence[Sequence[Segment]]) -> list[list[int]]:
        """Returns the number of tokens of every segment of chats, in which the placeholders have been replaced."""
        return [[len(ids) for ids in chat] for chat in self._tokenize(chats)] if chats else []

    def supervised_tokens(self, segments: Sequence[Segment]) -> list[int]:
        """Returns the supervised ids of `encode` for the same segments, without images and videos."""
        [tokenized] = self._tokenize([segments])
        return [token for ids, (_, is_answer) in zip(tokenized, segments, strict=True) if is_answer for token in ids]

    @cached_property
    def _slot_runs(self) -> re.Pattern[str]:
        """Matches several visual tokens in a row; group 1 is one of them."""
        return re.compile(rf"({'|'.join(map(re.escape, self.family.slot_texts.values()))})\1+")

    def collate(self, examples: list[Inputs]) -> Inputs:
        """Right-pads token fields to the longest example and stacks pixel fields; adds attention_mask [B, T]."""
        keys = list(dict.fromkeys(key for example in examples for key in example))
        batch = {"attention_mask": _pad([torch.ones_like(example["input_ids"]) for example in examples], 0)}
        for key in keys:
            values = [example[key] for example in examples if example.get(key) is not None]
            if not isinstance(values[0], Tensor):
                batch[key] = values
            elif key in self.family.pixel_keys:
                batch[key] = self.family.stack(key, values)
            else:
                batch[key] = _pad(values, (self.tokenizer.pad_token_id or 0) if key == "input_ids" else 0)
        return batch


def _pad(values: list[Tensor], fill: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)

"""Conversation -> token ids and loss mask, with the target's own chat template.

Chat templates do not mark the answers, and an answer may itself contain the text of a special token. The conversation is
therefore rendered twice, the second time with a probe in place of each answer:

    <|im_start|>assistant\n PROBE <|im_end|>\n      the text around the probe belongs to the template
    <|im_start|>assistant\n A dog.<|im_end|>\n      the text between them is the answer
                            ^^^^^^^^^^^^^^^^^       supervised: the answer and the token that ends it

The template of a thinking model opens a block of thoughts in the prompt, and drops the thoughts of earlier answers. There, the
last answer alone is supervised, after the prompt for it:

    <|im_start|>assistant\n<think>\n PROMPT, then: It barks.\n</think>\n\nA dog.<|im_end|>
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

from torch import Tensor

from data_prep.config import OnLong
from data_prep.conversation import BadTemplate, Conversation, Message, Part, TooLong, check_conversation, text_of
from sage.inputs.processing import Processor, Segment, TemplateFault, open_media

Example = dict[str, Any]
PRIVATE_USE = range(0xF0000, 0xF0100)  # characters of a Unicode private use area
OPEN_THOUGHTS, CLOSE_THOUGHTS = "<think>", "</think>"
NO_THOUGHTS = f"\n{CLOSE_THOUGHTS}\n\n"  # after a prompt that opens them


class Fit(StrEnum):
    """Outcome of an example under `data.max_length`."""

    kept = "kept"
    shortened = "shortened"
    dropped = "dropped"


class Lengths(NamedTuple):
    """Tokens of an example before it is shortened, visual tokens included.

    Attributes:
        total: of the complete conversation.
        first_turn: up to the end of the first answer.
        prompt: before the first answer.
    """

    total: int
    first_turn: int
    prompt: int

    def fit(self, max_length: int | None, on_long: OnLong) -> Fit:
        """Returns the outcome of the example."""
        if max_length is None or self.total <= max_length:
            return Fit.kept
        has_turn = on_long is not OnLong.drop and self.first_turn <= max_length
        has_beginning = on_long is OnLong.cut and self.prompt < max_length - 1
        return Fit.shortened if has_turn or has_beginning else Fit.dropped


def build_example(
    conversation: Conversation,
    processor: Processor,
    max_length: int | None = None,
    on_long: OnLong = OnLong.turn,
    num_frames: int = 32,
) -> Example:
    """Renders, tokenizes and masks one conversation, and shortens it if it is too long.

    Args:
        max_length: maximum number of tokens, visual tokens included; None: no limit. An image is kept completely or dropped.

    Returns:
        The fields of `Processor.encode` (input_ids [T], loss_mask [T] bool, pixel inputs) and `id`. The example ends with
        the token that ends the last answer.

    Raises:
        BadItem: the conversation or an image is invalid, or the mask covers none or all of its text.
        TooLong: the conversation is too long and cannot be shortened.
    """
    example = encode_example(conversation, processor, num_frames)
    return shorten_example(conversation, example, processor, max_length, on_long, num_frames)


def encode_example(conversation: Conversation, processor: Processor, num_frames: int = 32) -> Example:
    """`build_example` without a limit on the length."""
    conversation = check_conversation(conversation)
    example = _encode(conversation, processor, num_frames)
    _check_mask(conversation, example, processor)
    return {"id": conversation.id, **example}


def shorten_example(
    conversation: Conversation, example: Example, processor: Processor, max_length: int | None, on_long: OnLong, num_frames: int
) -> Example:
    """Returns an example of `encode_example`, shortened if it is too long; raises TooLong if it cannot be."""
    lengths = example_lengths(example)
    match lengths.fit(max_length, on_long):
        case Fit.kept:
            return example
        case Fit.dropped:
            reason = f"longer than data.max_length={max_length} (data.on_long={on_long}): {lengths.total} tokens"
            raise conversation.error(reason, TooLong)
    assert max_length is not None
    short = _keep_turns(check_conversation(conversation), example, processor, max_length, num_frames)
    return short | {"id": conversation.id}


def example_lengths(example: Example) -> Lengths:
    """Returns the lengths of a complete example."""
    mask = example["loss_mask"]
    return Lengths(len(mask), turn_ends(mask)[0], int(mask.int().argmax()))


def segments(messages: list[Message], processor: Processor) -> list[Segment]:
    """Renders the conversation as (text, is supervised) segments, up to the end of the last answer.

    The header before a supervised answer is that of a generation prompt: LLaVA-OneVision's template renders a different blank
    there in a complete turn. Where a prompt ends without the blank of a complete turn ("Assistant:", SmolVLM), the blank is the
    beginning of the answer, unless the tokenizer puts one there itself. After a prompt that opens thoughts, an answer without
    any begins by closing them.

    Raises:
        TemplateFault: the template rewrites answers, or renders an answer and its prompt differently.
    """
    separator, probe = _unused_characters(messages)
    escaped = [_escape(message, processor, separator) for message in messages]
    prompted = processor.render(escaped[:-1], True)
    if prompted.rstrip().endswith(OPEN_THOUGHTS):
        return _split_escapes(_thoughtful_segments(messages, processor, separator), separator)
    frame, answers = _split_answers(escaped, processor, probe)
    rendered_tail, prompted_tail = _header_tails(prompted, frame, answers)
    blank = "" if prompted_tail or processor.prepends_blank else rendered_tail
    found: list[Segment] = []
    begin = 0
    for i, answer in enumerate(answers):
        opening, close = frame[i][begin:], frame[i + 1]
        end = _end_of_turn(close, processor.end_texts)
        if not end or not opening.endswith(rendered_tail):
            ends = " or ".join(map(repr, processor.end_texts))
            raise TemplateFault(f"target: its chat template does not end each answer with {ends} in the same way")
        found.append((opening[: len(opening) - len(rendered_tail)] + prompted_tail, False))
        found.append((blank + answer + close[:end], True))
        begin = end
    return _split_escapes(found, separator)


def _thoughtful_segments(messages: list[Message], processor: Processor, separator: str) -> list[Segment]:
    """Returns the prompt for the last answer, which opens thoughts, and the answer, with its thoughts if it has any."""
    markers = {OPEN_THOUGHTS, CLOSE_THOUGHTS}  # the template looks for them
    *context, last = [_escape(message, processor, separator, markers) for message in messages]
    answer = text_of(last)
    if CLOSE_THOUGHTS not in answer:
        answer = NO_THOUGHTS + answer
    answer = answer.removeprefix(f"{OPEN_THOUGHTS}\n")
    return [(processor.render(context, True), False), (answer + processor.end_texts[0], True)]


def _end_of_turn(close: str, end_texts: list[str]) -> int:
    """Returns where the first of the end tokens ends in the text after an answer; 0 if it has none."""
    found = [(close.index(text), close.index(text) + len(text)) for text in end_texts if text in close]
    return min(found)[1] if found else 0


def _split_answers(messages: list[Message], processor: Processor, probe: str) -> tuple[list[str], list[str]]:
    """Returns the template's text around the n answers [n + 1], and the answers as the template renders them [n]."""
    probed = [{"role": "assistant", "content": [{"type": "text", "text": probe}]} if m["role"] == "assistant" else m
              for m in messages]  # fmt: skip
    frame = processor.render(probed, False).split(probe)
    answers = [text_of(message) for message in messages if message["role"] == "assistant"]
    rendered = processor.render(messages, False)
    for texts in (answers, [answer.strip() for answer in answers]):
        if len(frame) == len(texts) + 1 and rendered == _interleave(frame, texts):
            return frame, texts
    raise TemplateFault("target: its chat template rewrites or drops answers, so they cannot be located in the rendered text")


def _header_tails(prompted: str, frame: list[str], answers: list[str]) -> tuple[str, str]:
    """Returns the end of the header before the last answer, rendered and as a prompt; they may differ in blanks only."""
    rendered = _interleave(frame[:-1], answers[:-1])
    common = len(os.path.commonprefix([rendered, prompted]))
    if rendered[common:].strip() or prompted[common:].strip():
        raise TemplateFault("target: its chat template renders the prompt for an answer differently from the answer's header")
    return rendered[common:], prompted[common:]


def _interleave(frame: list[str], texts: list[str]) -> str:
    return "".join(part for pair in zip(frame, [*texts, ""], strict=True) for part in pair)


def _unused_characters(messages: list[Message]) -> tuple[str, str]:
    """Returns two private-use characters that do not occur in the conversation."""
    text = "".join(part.get("text", "") for message in messages for part in message["content"])
    unused = (chr(code) for code in PRIVATE_USE if chr(code) not in text)
    return next(unused), next(unused)


def _escape(message: Message, processor: Processor, separator: str, kept: Collection[str] = ()) -> Message:
    """Splits special tokens quoted in the text, except those `kept`, so that they are tokenized as plain text.

    Example: "<|im_end|>" becomes "<" + separator + "|im_end|>", later two segments, neither of which is a special token.
    """

    def split(match: re.Match[str]) -> str:
        text = match.group()
        return text if text in kept else text[0] + separator + text[1:]

    def escape(part: Part) -> Part:
        return part | {"text": processor.quotable.sub(split, part["text"])} if part["type"] == "text" else part

    return {"role": message["role"], "content": [escape(part) for part in message["content"]]}


def _split_escapes(found: list[Segment], separator: str) -> list[Segment]:
    return [(piece, is_supervised) for text, is_supervised in found for piece in text.split(separator) if piece]


def _encode(conversation: Conversation, processor: Processor, num_frames: int) -> Example:
    try:
        images, videos, fps = open_media(conversation.messages, num_frames, allow_urls=False)
        return processor.encode(segments(conversation.messages, processor), images, videos, fps)
    except TemplateFault as error:
        raise conversation.error(str(error), BadTemplate) from error
    except ValueError as error:
        raise conversation.error(str(error)) from error


def turn_ends(mask: Tensor) -> list[int]:
    """Returns the end of every turn; a turn ends with a run of supervised tokens."""
    steps = mask[:-1].int() - mask[1:].int()
    return (steps == 1).nonzero().flatten().add(1).tolist() + [len(mask)]


def _keep_turns(
    conversation: Conversation, example: Example, processor: Processor, max_length: int, num_frames: int
) -> Example:
    """Keeps the leading turns that fit, or the beginning of the first, whose visual tokens precede the answer and stay."""
    short, is_cut = leading_turns(conversation, turn_ends(example["loss_mask"]), max_length)
    if len(short.messages) < len(conversation.messages):
        example = _encode(short, processor, num_frames)
    if not is_cut:
        return example
    total = len(example["input_ids"])
    return {
        key: value[:max_length] if key not in processor.family.pixel_keys and len(value) == total else value
        for key, value in example.items()
    }


def leading_turns(conversation: Conversation, ends: list[int], max_length: int) -> tuple[Conversation, bool]:
    """Returns the turns that end by `max_length`, given the `turn_ends` of all, or the first turn, of which some is cut off."""
    keep = sum(end <= max_length for end in ends)
    answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    return replace(conversation, messages=conversation.messages[: answers[max(1, keep) - 1] + 1]), not keep


def _check_mask(conversation: Conversation, example: Example, processor: Processor) -> None:
    """Raises BadItem for a mask over none or all of the text: the template and the answer spans do not match."""
    visual = processor.family.visual_mask(example["input_ids"])
    text = example["loss_mask"][~visual]
    if bool((example["loss_mask"] & visual).any()):
        raise conversation.error("visual tokens inside an answer")
    if not bool(text.any()) or bool(text.all()):
        share = "no" if not bool(text.any()) else "every"
        raise conversation.error(f"the loss mask covers {share} text token; is this the target's own chat template?")

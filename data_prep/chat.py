"""A conversation -> token ids and a loss mask, through the target's own chat template.

Owns: where an answer begins and ends in the rendered text, markers quoted in text, what to do with long examples.
Does not own: tokenising and pixels (sage.inputs.processing).

Stock templates carry no markers of where an answer is, and an answer may itself contain what looks like one. So the
conversation is rendered twice, once with a probe in each answer's place:

    <|im_start|>assistant\n PROBE <|im_end|>\n      what stands before and after the probe is the template's
    <|im_start|>assistant\n A dog.<|im_end|>\n      what is left between them is the answer
                            ^^^^^^^^^^^^^^^^^       supervised: the answer and the token that ends it
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from data_prep.config import OnLong
from data_prep.conversation import BadTemplate, Conversation, Message, Part, TooLong, check, text_of
from sage.inputs.processing import Processor, Segment, TemplateFault, open_media

Example = dict[str, Any]
PRIVATE_USE = range(0xF0000, 0xF0100)


def build_example(
    conversation: Conversation,
    processor: Processor,
    max_length: int | None = None,
    on_long: OnLong = OnLong.turn,
    num_frames: int = 32,
) -> Example:
    """Renders, tokenises and masks one conversation.

    Args:
        max_length: tokens, visual ones included; None for no limit. A picture is kept whole or not at all.
        num_frames: at most so many frames of each clip.

    Returns:
        `Processor.encode`'s fields (input_ids [T], loss_mask [T] bool, pixel inputs) and `id`. The example ends with
        the token that ends the last answer.

    Raises:
        BadItem: the conversation or a picture is broken, or its mask covers none or all of its text.
        TooLong: it does not fit and may not be shortened.
    """
    conversation = check(conversation)
    example = _encode(conversation, processor, num_frames)
    if max_length is not None and len(example["input_ids"]) > max_length:
        example = _shorten(conversation, example, processor, max_length, on_long, num_frames)
    _check_mask(conversation, example, processor)
    return {"id": conversation.id, **example}


def segments(messages: list[Message], processor: Processor) -> list[Segment]:
    """The rendered chat as (text, supervised) pieces, up to the end of the last answer.

    The header before a supervised answer is the one generation would be prompted with (LLaVA-OneVision's template
    writes another blank there when it renders a finished turn).

    Raises:
        TemplateFault: the template rewrites answers, or does not render an answer as it prompts for one.
    """
    shield, probe = _unused_characters(messages)
    shielded = [_shield(message, processor, shield) for message in messages]
    frame, answers = _split(shielded, processor, probe)
    rendered_tail, prompted_tail = _headers(shielded, processor, frame, answers)
    end_of_turn = processor.tokenizer.eos_token
    pieces: list[Segment] = []
    begin = 0
    for i, answer in enumerate(answers):
        opening, close = frame[i][begin:], frame[i + 1]
        if end_of_turn not in close or not opening.endswith(rendered_tail):
            raise TemplateFault(f"target: its chat template does not end each answer with {end_of_turn!r} in the same way")
        end = close.index(end_of_turn) + len(end_of_turn)
        pieces.append((opening[: len(opening) - len(rendered_tail)] + prompted_tail, False))
        pieces.append((answer + close[:end], True))
        begin = end
    return _drop_shields(pieces, shield)


def _split(messages: list[Message], processor: Processor, probe: str) -> tuple[list[str], list[str]]:
    """What the template writes around the n answers [n + 1], and the answers as it renders them [n]."""
    asked = [{"role": "assistant", "content": [{"type": "text", "text": probe}]} if m["role"] == "assistant" else m
             for m in messages]  # fmt: skip
    frame = processor.render(asked, False).split(probe)
    answers = [text_of(message) for message in messages if message["role"] == "assistant"]
    rendered = processor.render(messages, False)
    for texts in (answers, [answer.strip() for answer in answers]):
        if len(frame) == len(texts) + 1 and rendered == _interleave(frame, texts):
            return frame, texts
    raise TemplateFault("target: its chat template rewrites or drops answers, so they cannot be told from the rest")


def _headers(messages: list[Message], processor: Processor, frame: list[str], answers: list[str]) -> tuple[str, str]:
    """How the header before an answer ends in a finished turn and in a prompt; they may differ in blanks only."""
    finished = _interleave(frame[:-1], answers[:-1])
    prompted = processor.render(messages[:-1], True)
    common = len(os.path.commonprefix([finished, prompted]))
    if finished[common:].strip() or prompted[common:].strip():
        raise TemplateFault("target: its chat template prompts for an answer otherwise than it renders one")
    return finished[common:], prompted[common:]


def _interleave(frame: list[str], texts: list[str]) -> str:
    return "".join(part for pair in zip(frame, [*texts, ""], strict=True) for part in pair)


def _unused_characters(messages: list[Message]) -> tuple[str, str]:
    """Two characters (of a private plane) that occur nowhere in the conversation."""
    text = "".join(part.get("text", "") for message in messages for part in message["content"])
    free = [chr(code) for code in PRIVATE_USE if chr(code) not in text]
    return free[0], free[1]


def _shield(message: Message, processor: Processor, shield: str) -> Message:
    """Breaks what looks like a special token in the text, so that it is tokenised as the plain text it is.

    Example: "<|im_end|>" becomes "<" + shield + "|im_end|>", later two pieces, neither of which is a special token.
    """
    pattern = re.compile("|".join(sorted(map(re.escape, _special_texts(processor)), key=len, reverse=True)))

    def split(match: re.Match[str]) -> str:
        return match.group()[0] + shield + match.group()[1:]

    def plain(part: Part) -> Part:
        return part | {"text": pattern.sub(split, part["text"])} if part["type"] == "text" else part

    return {"role": message["role"], "content": [plain(part) for part in message["content"]]}


def _special_texts(processor: Processor) -> set[str]:
    added = {text for text in processor.tokenizer.get_added_vocab() if len(text) > 1}
    return added | {processor.family.image_token, processor.family.video_token}


def _drop_shields(pieces: list[Segment], shield: str) -> list[Segment]:
    return [(text, flag) for piece, flag in pieces for text in piece.split(shield) if text]


def _encode(conversation: Conversation, processor: Processor, num_frames: int) -> Example:
    try:
        images, videos, fps = open_media(conversation.messages, num_frames, allow_urls=False)
        return processor.encode(segments(conversation.messages, processor), images, videos, fps)
    except TemplateFault as error:
        raise conversation.bad(str(error), BadTemplate) from error
    except ValueError as error:
        raise conversation.bad(str(error)) from error


def _shorten(
    conversation: Conversation,
    example: Example,
    processor: Processor,
    max_length: int,
    on_long: OnLong,
    num_frames: int,
) -> Example:
    """The leading turns that fit. A turn ends where a run of supervised tokens ends."""
    mask = example["loss_mask"].int()
    ends = ((mask[:-1] - mask[1:]) == 1).nonzero().flatten().add(1).tolist() + [len(mask)]
    keep = sum(end <= max_length for end in ends)
    if on_long is not OnLong.drop and keep:
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        short = replace(conversation, messages=conversation.messages[: answers[keep - 1] + 1])
        return _encode(short, processor, num_frames)
    begin = int(mask.argmax())
    if on_long is OnLong.cut and begin < max_length - 1:
        return _cut(conversation, example, processor, max_length, num_frames)
    reason = f"longer than data.max_length={max_length} (data.on_long={on_long}): {len(mask)} tokens"
    raise TooLong(conversation.source, conversation.meta.get("index", conversation.id), reason)


def _cut(conversation: Conversation, example: Example, processor: Processor, max_length: int, num_frames: int) -> Example:
    """The first turn with its answer cut; what is cut is the answer's text, so no picture is touched."""
    first = next(i for i, message in enumerate(conversation.messages) if message["role"] == "assistant")
    if first + 1 < len(conversation.messages):
        example = _encode(replace(conversation, messages=conversation.messages[: first + 1]), processor, num_frames)
    total = len(example["input_ids"])
    return {
        key: value[:max_length] if key not in processor.family.pixel_keys and len(value) == total else value
        for key, value in example.items()
    }


def _check_mask(conversation: Conversation, example: Example, processor: Processor) -> None:
    """A mask over none or all of the text means the template and the spans do not fit each other."""
    visual = visual_mask(example, processor)
    text = example["loss_mask"][~visual]
    if bool((example["loss_mask"] & visual).any()):
        raise conversation.bad("a picture's tokens inside an answer")
    if not bool(text.any()) or bool(text.all()):
        share = "no" if not bool(text.any()) else "every"
        raise conversation.bad(f"the loss mask covers {share} text token; is this the target's own chat template?")


def visual_mask(example: Example, processor: Processor) -> Tensor:
    """BoolTensor [T], True at picture and video placeholders."""
    ids = processor.tokenizer.convert_tokens_to_ids([processor.family.image_token, processor.family.video_token])
    return torch.isin(example["input_ids"], torch.tensor([token for token in ids if token is not None]))

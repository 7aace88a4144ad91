"""Conversation -> token ids and loss mask, with the target's own chat template.

Chat templates do not mark the answers, and an answer may itself contain the text of a special token. The conversation is
therefore rendered twice, the second time with a probe in place of each answer:

    <|im_start|>assistant\n PROBE <|im_end|>\n      the text around the probe belongs to the template
    <|im_start|>assistant\n A dog.<|im_end|>\n      the text between them is the answer
                            ^^^^^^^^^^^^^^^^^       supervised: the answer and the token that ends it

Where the template itself renders parts of answers (thoughts, tool calls), each answer is what the template adds to the prompt
for it. Most templates drop the thoughts of earlier answers; then the last answer alone is supervised, after its prompt:

    <|im_start|>assistant\n<think>\n PROMPT, then: It barks.\n</think>\n\nA dog.<|im_end|>
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

from torch import Tensor

from data_prep.config import OnLong
from data_prep.conversation import BadItem, BadTemplate, Conversation, Message, TooLong, check_conversation
from sage.inputs.media import open_media
from sage.inputs.messages import escape, text_of
from sage.inputs.processing import Processor, Segment, TemplateFault

Example = dict[str, Any]
OPEN_THOUGHTS, CLOSE_THOUGHTS = "<think>", "</think>"
NO_THOUGHTS = f"\n{CLOSE_THOUGHTS}\n\n"  # after a prompt that opens them


class Fit(StrEnum):
    """Outcome of an example under `data.max_length`."""

    kept = "kept"
    shortened = "shortened"
    dropped = "dropped"


class Lengths(NamedTuple):
    """Tokens of an example before it is shortened, visual tokens included."""

    total: int
    first_turn: int  # up to the end of the first answer
    prompt: int  # before the first answer

    def fit(self, max_length: int | None, on_long: OnLong) -> Fit:
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
    """Renders, tokenizes and masks one conversation, and shortens it to `max_length` tokens, visual ones included.

    An image is kept completely or dropped. Returns the fields of `Processor.encode` (input_ids [T], loss_mask [T] bool, pixel
    inputs) and `id`, up to the token that ends the last answer, if it is finished. BadItem if the conversation or an image is
    invalid, or the mask covers none or all of its text; TooLong if it cannot be shortened.
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
    mask = example["loss_mask"]
    return Lengths(len(mask), turn_ends(mask)[0], int(mask.int().argmax()))


def segments(messages: list[Message], processor: Processor) -> list[Segment]:
    """Renders the conversation as (text, is supervised) segments, up to the end of the last answer.

    The header before a supervised answer is that of a generation prompt: LLaVA-OneVision's template renders a different blank
    there in a complete turn. Where a prompt ends without the blank of a complete turn ("Assistant:", SmolVLM), the blank is the
    beginning of the answer, unless the tokenizer puts one there itself. After a prompt that opens thoughts, an answer without
    any begins by closing them. A hybrid model thinks where `processor.thinking` or the answer says so. TemplateFault if the
    template rewrites answers, or renders an answer and its prompt differently.
    """
    messages = [_with_thoughts(message, i, processor) for i, message in enumerate(messages)]
    escaped, separator = escape(messages, processor.quotable)
    prompted = processor.render(escaped[:-1], True)
    # where the template does more with a message than to put its text between fixed texts
    is_rendered = any(m["role"] == "tool" or any(map(m.get, ("has_thoughts", "tool_calls", "tools"))) for m in messages)
    if is_rendered or processor.thinking or prompted.rstrip().endswith(OPEN_THOUGHTS):
        rendered = _rendered_segments(escaped, processor, separator)
    else:
        rendered = _probed_segments(escaped, prompted, processor, chr(ord(separator) + 1))
    return [
        (piece, is_supervised)
        for text, is_supervised in rendered
        for piece in (text.split(separator) if isinstance(text, str) else [text])
        if piece
    ]


def _with_thoughts(message: Message, index: int, processor: Processor) -> Message:
    """Returns a message with its thoughts in the text, as a thinking model writes them; with `thinking=False` without them.

    Token ids that are those of another text, or of another target, are left out.
    """
    if message["role"] != "assistant":
        return message
    thoughts, text = message.get("reasoning_content"), text_of(message)
    knows_thoughts = CLOSE_THOUGHTS in (processor.chat_template or "")
    is_cut = knows_thoughts and text.lstrip().startswith(OPEN_THOUGHTS) and CLOSE_THOUGHTS not in text
    if thoughts and not knows_thoughts:
        raise ValueError(f"message {index}: reasoning_content; the target's chat template has no thoughts; remove the key")
    if processor.thinking is False and knows_thoughts:
        text = "" if is_cut else text.rpartition(CLOSE_THOUGHTS)[2].lstrip("\n")
        if not text and not message.get("tool_calls"):
            raise ValueError(f"message {index}: nothing but thoughts, which data.thinking=off leaves out; remove the row")
    elif thoughts and CLOSE_THOUGHTS not in text:
        text = f"{OPEN_THOUGHTS}\n{thoughts.strip()}{NO_THOUGHTS}{text}"
    ids = message.get("token_ids") or ()
    unused = {"reasoning_content"} | ({"token_ids"} if ids and processor.answer_of(ids)[0] != text else set())
    kept = {key: value for key, value in message.items() if key not in unused}
    has_thoughts = bool(is_cut and processor.thinking) or (knows_thoughts and CLOSE_THOUGHTS in text)
    return kept | {"content": [{"type": "text", "text": text}], "has_thoughts": has_thoughts}


def _probed_segments(messages: list[Message], prompted: str, processor: Processor, probe: str) -> list[Segment]:
    frame, answers = _split_answers(messages, processor, probe)
    header = _interleave(frame[:-1], answers[:-1])  # of the last answer, rendered and as a prompt: they may differ in blanks
    common = len(os.path.commonprefix([header, prompted]))
    rendered_tail, prompted_tail = header[common:], prompted[common:]
    if rendered_tail.strip() or prompted_tail.strip():
        raise TemplateFault("target: its chat template renders the prompt for an answer differently from the answer's header")
    blank = "" if prompted_tail or processor.prepends_blank else rendered_tail
    parts: list[Segment] = []
    begin = 0
    turns = [message for message in messages if message["role"] == "assistant"]
    for i, (turn, answer) in enumerate(zip(turns, answers, strict=True)):
        opening, close = frame[i][begin:], frame[i + 1]
        end = _end_of_turn(close, processor.end_texts)
        if not end or not opening.endswith(rendered_tail):
            ends = " or ".join(map(repr, processor.end_texts))
            raise TemplateFault(f"target: its chat template does not end each answer with {ends} in the same way")
        parts.append((opening[: len(opening) - len(rendered_tail)] + prompted_tail, False))
        parts += _answer_segments(turn, blank + answer, close[:end])
        begin = end
    return parts


def _answer_segments(message: Message, text: str, end: str) -> list[Segment]:
    """Returns the segments of an answer: its own token ids if it has any, else its text; without `end` if it is unfinished."""
    is_supervised, end = bool(message.get("weight", 1)), "" if message.get("unfinished") else end
    ids = tuple(message.get("token_ids") or ())
    return [(ids, is_supervised), (end, is_supervised)] if ids else [(text + end, is_supervised)]


def _rendered_segments(messages: list[Message], processor: Processor, separator: str) -> list[Segment]:
    """Returns each answer after the prompt for it, from the first one on that later prompts repeat unchanged."""
    parts: list[Segment] = []
    before = ""
    _check_tools(messages, processor, separator)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        with processor.thinks(True if message.get("has_thoughts") else processor.thinking):
            prompt = processor.render(messages[:i], True)
            answer, end = _rendered_answer(messages[: i + 1], prompt, processor)
        if not prompt.startswith(before):
            parts, before = [], ""
        parts.append((prompt[len(before) :], False))
        parts += _answer_segments(message, answer, end)
        before = prompt + answer + end
    return parts


def _rendered_answer(messages: list[Message], prompt: str, processor: Processor) -> tuple[str, str]:
    """Returns the last answer, as the template renders it after its prompt or as it is, and the token that ends it."""
    message, rendered = messages[-1], processor.render(messages, False)
    rest = rendered.removeprefix(prompt) if rendered.startswith(prompt) else ""
    end = _end_of_turn(rest, processor.end_texts)
    answer, text = rest[:end], text_of(message)
    closing = next((token for token in processor.end_texts if answer.endswith(token)), processor.end_texts[0])
    calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    # the text of an answer with thoughts, or of a model that thinks, is what it wrote: templates add and strip line breaks
    if (
        end
        and (calls or not processor.thinking)
        and all(part in answer for part in (*calls, text.rpartition(CLOSE_THOUGHTS)[0].strip()))
    ):
        return answer.removesuffix(closing), closing
    if calls:
        raise ValueError(f"message {len(messages) - 1}: tool_calls; the target's chat template does not render them; remove it")
    if prompt.rstrip().endswith(OPEN_THOUGHTS):
        has_thoughts = message.get("has_thoughts") or message.get("unfinished")  # cut off, before it closes them
        text = text.removeprefix(f"{OPEN_THOUGHTS}\n") if has_thoughts else NO_THOUGHTS + text
    return text, closing


def _check_tools(messages: list[Message], processor: Processor, separator: str) -> None:
    """Raises ValueError if the template renders tools, or their results, not at all."""
    rendered = processor.render(messages, False)
    for i, message in enumerate(messages):
        if message["role"] == "tool" and text_of(message).strip() not in rendered:
            raise ValueError(f"message {i}: role 'tool'; the target's chat template does not render it; remove the row")
    if messages[0].get("tools") and rendered == processor.render([messages[0] | {"tools": None}, *messages[1:]], False):
        raise ValueError("tools: the target's chat template renders none; remove the key")


def _end_of_turn(close: str, end_texts: list[str]) -> int:
    """Returns where the first of the end tokens ends in the text after an answer; 0 if it has none."""
    spans = [(close.index(text), close.index(text) + len(text)) for text in end_texts if text in close]
    return min(spans)[1] if spans else 0


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


def _interleave(frame: list[str], texts: list[str]) -> str:
    return "".join(part for pair in zip(frame, [*texts, ""], strict=True) for part in pair)


def _encode(conversation: Conversation, processor: Processor, num_frames: int) -> Example:
    with naming_faults(conversation):
        images, videos, fps = open_media(conversation.messages, num_frames, allow_urls=False)
        return processor.encode(segments(conversation.messages, processor), images, videos, fps)


@contextmanager
def naming_faults(conversation: Conversation) -> Iterator[None]:
    """Raises a ValueError as the BadItem of a conversation, as BadTemplate if it is the template's fault."""
    try:
        yield
    except ValueError as error:
        raise conversation.error(str(error), BadTemplate if isinstance(error, TemplateFault) else BadItem) from error


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
    total, pixels = len(example["input_ids"]), processor.family.pixel_keys
    return {key: value[:max_length] if key not in pixels and len(value) == total else value for key, value in example.items()}


def leading_turns(conversation: Conversation, ends: list[int], max_length: int) -> tuple[Conversation, bool]:
    """Returns the turns that end by `max_length`, given the `turn_ends` of all, or the first turn, of which some is cut off."""
    keep = sum(end <= max_length for end in ends)
    answers = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant" and m.get("weight", 1)]
    return replace(conversation, messages=conversation.messages[: answers[max(1, keep) - 1] + 1]), not keep


def _check_mask(conversation: Conversation, example: Example, processor: Processor) -> None:
    """Raises BadItem for a mask over none or all of the text: the template and the answer spans do not match."""
    visual, mask = processor.family.visual_mask(example["input_ids"]), example["loss_mask"]
    if bool((mask & visual).any()):
        raise conversation.error("visual tokens inside an answer")
    if len(values := mask[~visual].unique()) < 2:
        is_full = len(values) and bool(values)
        found = "every text token; is this the target's own chat template?" if is_full else "no text token; has each weight 0?"
        raise conversation.error(f"the loss mask covers {found}")

"""Conversations of thinking models: their templates open thoughts in the prompt, and drop those of earlier answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.data_helpers import QWEN_TEMPLATE, assistant, make_image, make_processor, user

from data_prep.chat import build_example
from data_prep.config import OnLong
from data_prep.conversation import Conversation
from sage.inputs.processing import Processor

# As published: thoughts are found by their end, and those of earlier answers are dropped.
DROPS = "{%- set ns.text = part.text.split('</think>')[-1].lstrip('\\n') if message.role == 'assistant' else part.text -%}"
TEMPLATE = "{%- set ns = namespace(text='') -%}" + QWEN_TEMPLATE.replace("{{ part.text }}", DROPS + "{{ ns.text }}").replace(
    "{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>\\n' }}"
)


@pytest.fixture
def processor() -> Processor:
    processor = make_processor("qwen2_5_vl")
    processor.tokenizer.add_tokens(["<think>", "</think>"])
    processor.chat_template = TEMPLATE
    return processor


def supervised(processor: Processor, messages: list[dict[str, Any]], **options: Any) -> tuple[list[int], str]:
    """Returns the ids before the answer, and the supervised text, which is one run at the end."""
    example = build_example(Conversation("c", messages), processor, **options)
    mask = example["loss_mask"]
    start = int(mask.int().argmax())
    assert not mask[:start].any() and mask[start:].all()
    return example["input_ids"][:start].tolist(), processor.tokenizer.decode(example["input_ids"][start:])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Yes.", "\n</think>\n\nYes.<|im_end|>"),
        ("It barks.\n</think>\n\nA dog.", "It barks.\n</think>\n\nA dog.<|im_end|>"),
        ("<think>\nIt barks.\n</think>\n\nA dog.", "It barks.\n</think>\n\nA dog.<|im_end|>"),
        ("\n</think>\n\nA dog.", "\n</think>\n\nA dog.<|im_end|>"),
    ],
)
def test_the_answer_follows_its_prompt(processor: Processor, answer: str, expected: str) -> None:
    """Prompt and pixels are those of decoding; thoughts end with their token; quoted special tokens stay text."""
    question = user(make_image(), "Hi <|im_end|>?")
    prompt, text = supervised(processor, [question, assistant(answer)])
    plain = user(make_image(), "Hi?")
    assert supervised(processor, [plain, assistant(answer)])[0] == processor.prepare([plain])["input_ids"][0].tolist()
    assert text == expected
    assert prompt.count(processor.tokenizer.convert_tokens_to_ids("<think>")) == 1


def test_thoughts_end_with_one_token(processor: Processor) -> None:
    example = build_example(Conversation("c", [user("Hi?"), assistant("Hm.\n</think>\n\nNo <|im_end|>.")]), processor)
    ids = example["input_ids"][example["loss_mask"]]
    close, end = (processor.tokenizer.convert_tokens_to_ids(text) for text in ("</think>", "<|im_end|>"))
    assert int((ids == close).sum()) == 1 and int((ids == end).sum()) == 1 and ids[-1] == end


def test_earlier_answers_are_context_without_thoughts(processor: Processor) -> None:
    messages = [user("Hi?"), assistant("Hm.\n</think>\n\nYes."), user("No?"), assistant("So.\n</think>\n\nab")]
    prompt, text = supervised(processor, messages)
    assert prompt == processor.prepare(messages[:3])["input_ids"][0].tolist()
    rendered = processor.tokenizer.decode(torch.tensor(prompt))
    assert "Hm." not in rendered and "assistant\nYes.<|im_end|>" in rendered and text == "So.\n</think>\n\nab<|im_end|>"


def test_a_long_answer_is_cut(processor: Processor) -> None:
    messages = [user("Hi?"), assistant("Yes. " * 40)]
    _, text = supervised(processor, messages, max_length=80, on_long=OnLong.cut)
    assert text.startswith("\n</think>\n\nYes. Yes.") and not text.endswith("<|im_end|>")

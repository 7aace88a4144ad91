"""Prompts with follow-up questions, each asked after the target's own answers to the previous questions.

Benchmarks such as MMSpec provide the questions of a conversation without answers: the first question is the prompt, the
others are in `meta[FOLLOW_UPS]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from data_prep.conversation import Conversation, Message

FOLLOW_UPS = "follow_ups"


def expand_follow_ups(prompts: Iterable[Any], answer: Callable[[list[Message]], str]) -> Iterator[Any]:
    """Yields every prompt, followed by one prompt per follow-up question; prompts that are no conversations pass unchanged.

    Args:
        answer: messages -> the target's answer; called only when the next prompt is requested.
    """
    for prompt in prompts:
        yield prompt
        if isinstance(prompt, Conversation):
            yield from _follow_ups(prompt, answer)


def _follow_ups(prompt: Conversation, answer: Callable[[list[Message]], str]) -> Iterator[Conversation]:
    messages = prompt.messages
    for number, question in enumerate(prompt.meta.get(FOLLOW_UPS, ()), start=2):
        reply = {"role": "assistant", "content": [{"type": "text", "text": answer(messages)}]}
        messages = [*messages, reply, {"role": "user", "content": [{"type": "text", "text": question}]}]
        yield replace(prompt, id=f"{prompt.id}-turn-{number}", messages=messages, meta=prompt.meta | {FOLLOW_UPS: []})

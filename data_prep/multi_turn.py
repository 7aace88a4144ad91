"""Prompts of several turns: each later question is asked after the target's own answers to those before it.

Benchmarks such as MMSpec give the questions of a conversation and no answers; the first is the prompt, the others wait in
`meta["later"]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from data_prep.conversation import Conversation, Message

LATER = "later"


def asked_in_turn(prompts: Iterable[Any], answer: Callable[[list[Message]], str]) -> Iterator[Any]:
    """Every prompt, each followed by its later turns as prompts of their own.

    Args:
        prompts: conversations; anything else is passed on as it is.
        answer: what the target says to some messages. Called only when the next turn is asked for.
    """
    for prompt in prompts:
        yield prompt
        if isinstance(prompt, Conversation):
            yield from _later(prompt, answer)


def _later(prompt: Conversation, answer: Callable[[list[Message]], str]) -> Iterator[Conversation]:
    messages = prompt.messages
    for number, question in enumerate(prompt.meta.get(LATER, ()), start=2):
        said = {"role": "assistant", "content": [{"type": "text", "text": answer(messages)}]}
        messages = [*messages, said, {"role": "user", "content": [{"type": "text", "text": question}]}]
        yield replace(prompt, id=f"{prompt.id}-turn-{number}", messages=messages, meta=prompt.meta | {LATER: []})

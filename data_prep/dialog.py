"""One conversation while its answers are replaced, in order, each conditioned on the previous ones.

Owns: the state of a conversation, its outcome, the seeds. Does not own: where answers come from, files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from data_prep.conversation import BadItem, Conversation, Message, check_conversation


class Outcome(StrEnum):
    """What became of an answer, and of a conversation: the outcome of its first answer that is not `answered`."""

    answered = "answered"
    cut = "cut short"  # no end within max_new_tokens
    empty = "empty"
    refused = "refused"  # by the server
    failed = "failed"  # at every attempt
    invalid = "invalid"  # the conversation, or an image or video of it


@dataclass(frozen=True)
class Answer:
    """The target's answer to one prompt; `reason` says why there is none."""

    text: str
    outcome: Outcome = Outcome.answered
    reason: str = ""


class Prompt(NamedTuple):
    """The messages before an answer, and the answer's seed."""

    messages: list[Message]
    seed: int


class Dialog:
    """A conversation in progress: alternately `next_prompt` and `add`, until `next_prompt` returns None.

    Attributes:
        position: of the conversation in the dataset.
        outcome: `answered` as long as all answers are; any other one ends the dialog.
        reason: why not all are, naming the conversation.
    """

    def __init__(self, position: int, conversation: Conversation, seed: int) -> None:
        self.position, self.outcome, self.reason = position, Outcome.answered, ""
        self._conversation, self._seed = conversation, seed
        self._messages: list[Message] = []
        self._rest = list(conversation.messages)

    @classmethod
    def open(cls, dataset: Any, position: int, seed: int) -> Dialog:
        """Reads a conversation of the dataset; one that is invalid is at its end."""
        conversation = Conversation("", [])
        try:
            conversation = dataset.conversation(position)
            return cls(position, check_conversation(conversation), seed)
        except BadItem as error:
            dialog = cls(position, replace(conversation, messages=[]), seed)
            dialog.outcome, dialog.reason = Outcome.invalid, str(error)
            return dialog

    @property
    def kept(self) -> int:
        """Number of answers."""
        return sum(message["role"] == "assistant" for message in self._messages)

    def answered(self) -> Conversation:
        """Returns the conversation with the answers so far."""
        return replace(self._conversation, messages=self._messages)

    def next_prompt(self) -> Prompt | None:
        """Returns the prompt of the next answer."""
        while self._rest and self._rest[0]["role"] != "assistant":
            self._messages.append(self._rest.pop(0))
        return Prompt(self._messages, _seed(self._seed, self._conversation.id, len(self._messages))) if self._rest else None

    def add(self, answer: Answer) -> None:
        """Adds the answer to the last prompt; without one, the dialog ends with its last answer."""
        outcome = answer.outcome
        if outcome is Outcome.answered and not answer.text.strip():
            outcome = Outcome.empty
        if outcome is Outcome.answered:
            self._rest.pop(0)
            self._messages.append({"role": "assistant", "content": [{"type": "text", "text": answer.text}]})
            return
        self.outcome = outcome
        self.reason = str(self._conversation.error(f"answer {self.kept + 1}: {answer.reason or REASONS[outcome]}"))
        last = max((i for i, message in enumerate(self._messages) if message["role"] == "assistant"), default=-1)
        self._messages, self._rest = self._messages[: last + 1], []


REASONS = {
    Outcome.cut: "did not end within max_new_tokens",
    Outcome.empty: "is empty",
    Outcome.refused: "refused",
    Outcome.failed: "failed",
    Outcome.invalid: "invalid",
}
Answerer = Callable[[list[Message], int], Answer]  # messages, seed
Drive = Callable[[Iterator[Dialog]], Iterator[Dialog]]  # runs dialogs to their end and yields each, in any order


def one_by_one(answer: Answerer) -> Drive:
    """Returns the drive that answers one prompt after the other."""

    def drive(dialogs: Iterator[Dialog]) -> Iterator[Dialog]:
        for dialog in dialogs:
            while (prompt := dialog.next_prompt()) is not None:
                dialog.add(answer(*prompt))
            yield dialog

    return drive


def _seed(seed: int, name: str, turn: int) -> int:
    """Returns the seed of one answer, which depends neither on the rank nor on the order of the conversations."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}/{turn}".encode()).digest()[:4], "big") >> 1

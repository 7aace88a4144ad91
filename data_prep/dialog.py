"""A conversation whose answers are replaced in order, each conditioned on the previous ones, with our decoder as a source."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch

import sage
from data_prep.config import OnCut, RegenerateConfig
from data_prep.conversation import BadItem, Conversation, Message, check_conversation
from sage.decoding.batch import BatchDecoder
from sage.decoding.generation import Generation
from sage.inputs.media import open_media
from sage.runtime.executors import passes_as
from sage.runtime.modes import PassMode


class Outcome(StrEnum):
    """The outcome of an answer. That of a conversation is the outcome of its first answer that is not `answered`."""

    answered = "answered"
    cut = "cut short"  # it does not end within max_new_tokens
    empty = "empty"
    refused = "refused"  # the server does not accept the request
    failed = "failed"  # every attempt failed
    invalid = "invalid"  # the conversation, or one of its images and videos, cannot be used


@dataclass(frozen=True)
class TargetAnswer:
    """The target's answer to one prompt; `reason`: why there is none; `token_ids`: where the text has others."""

    text: str
    outcome: Outcome = Outcome.answered
    reason: str = ""
    token_ids: tuple[int, ...] = ()


REASONS = {Outcome.cut: "did not end within max_new_tokens", Outcome.empty: "is empty"}  # the others come with a reason


class Dialog:
    """A conversation in progress: alternately `next_request` and `add`, until `next_request` returns None.

    The outcome is `answered` as long as all answers are; any other ends the dialog, with a reason that names the conversation.

    Args:
        position: of the conversation in the dataset.
        settings: of the answers; `on_cut` says whether one that is cut short is the last of its conversation, or left out.
    """

    def __init__(self, position: int, conversation: Conversation, settings: RegenerateConfig) -> None:
        self.position, self.outcome, self.reason = position, Outcome.answered, ""
        self._conversation, self._settings = conversation, settings
        self._messages: list[Message] = []
        self._rest = list(conversation.messages)

    @classmethod
    def open(cls, dataset: Any, position: int, settings: RegenerateConfig) -> Dialog:
        """Reads a conversation of the dataset. An invalid conversation yields a finished dialog."""
        conversation = Conversation("", [])
        try:
            conversation = dataset.conversation(position)
            return cls(position, check_conversation(conversation), settings)
        except BadItem as error:
            dialog = cls(position, replace(conversation, messages=[]), settings)
            dialog.outcome, dialog.reason = Outcome.invalid, str(error)
            return dialog

    @property
    def kept(self) -> int:
        return sum(message["role"] == "assistant" for message in self._messages)

    def answered(self) -> Conversation:
        return replace(self._conversation, messages=self._messages)

    def next_request(self) -> tuple[list[Message], int] | None:
        """Returns the messages before the next answer and its seed; None if the dialog is finished."""
        while self._rest and self._rest[0]["role"] != "assistant":
            self._messages.append(self._rest.pop(0))
        if not self._rest:
            return None
        # depends neither on the rank nor on the order of the conversations
        key = f"{self._settings.seed}/{self._conversation.id}/{len(self._messages)}"
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") >> 1
        return self._messages, seed

    def add(self, answer: TargetAnswer) -> None:
        """Adds the answer to the last request. Any but a complete answer ends the dialog after its last kept one."""
        outcome, is_blank = answer.outcome, not answer.text.strip()
        if outcome is Outcome.answered and is_blank:
            outcome = Outcome.empty
        reason = f"answer {self.kept + 1}: {answer.reason or REASONS.get(outcome, outcome)}"
        keeps_cut = self._settings.on_cut is OnCut.keep and not is_blank
        if outcome is Outcome.answered or (outcome is Outcome.cut and keeps_cut):
            self._rest.pop(0)
            extras: dict[str, Any] = {"token_ids": list(answer.token_ids)} if answer.token_ids else {}
            extras |= {"unfinished": True} if outcome is Outcome.cut else {}
            self._messages.append({"role": "assistant", "content": [{"type": "text", "text": answer.text}], **extras})
        if outcome is Outcome.answered:
            return
        self.outcome = outcome
        self.reason = str(self._conversation.error(reason))
        last = max((i for i, message in enumerate(self._messages) if message["role"] == "assistant"), default=-1)
        self._messages, self._rest = self._messages[: last + 1], []


Drive = Callable[[Iterator[Dialog]], Iterator[Dialog]]  # runs dialogs to their end and yields each, in any order


# -- our decoder ---------------------------------------------------------------------------------------------------------


def own_answers(target: Any, draft: Any, settings: RegenerateConfig, num_frames: int, num_answers: int) -> Drive:
    """Returns the source of the target's answers by our decoder, with speculative decoding if there is a draft.

    It answers `settings.batch_size` conversations at a time, and raises ValueError if they do not fit into the memory of the
    device. While it answers, the target's passes run as is fastest for `num_answers` answers.
    """

    def drive(dialogs: Iterator[Dialog]) -> Iterator[Dialog]:
        try:
            with passes_as(PassMode.auto, target, num_answers):
                yield from _decoded(target, draft, settings, num_frames, dialogs)
        except torch.OutOfMemoryError as error:
            if settings.batch_size == 1:
                raise
            raise ValueError(
                f"regenerate.batch_size={settings.batch_size}: so many conversations at once do not fit into the memory of "
                f"{target.device}; halve it, and the same command continues after the finished answers"
            ) from error

    return drive


def _decoded(
    target: Any, draft: Any, settings: RegenerateConfig, num_frames: int, dialogs: Iterator[Dialog]
) -> Iterator[Dialog]:
    """Decodes the answers of several conversations together; a conversation that ends makes room for the next one."""
    decoder = BatchDecoder(target, draft, settings.batch_size)
    policy, sampling = settings.policy if draft is not None else "autoregressive", sage.Sampling.from_attributes(settings)
    answering: dict[Generation, Dialog] = {}

    def is_asked(dialog: Dialog) -> bool:
        """Adds the dialog's next request; returns whether there is one."""
        while (request := dialog.next_request()) is not None:
            messages, seed = request
            try:  # as training does: the same rotation, the same frames of a video
                media = open_media(messages, num_frames, allow_urls=False)
            except ValueError as error:
                dialog.add(TargetAnswer("", Outcome.invalid, str(error)))
                continue
            inputs = target.processor.prepare(messages, media)
            answering[decoder.add(inputs, policy, sampling=sampling, seed=seed)] = dialog
            return True
        return False

    while True:
        while decoder.has_room and (dialog := next(dialogs, None)) is not None:
            if not is_asked(dialog):
                yield dialog
        if not answering:
            return
        for done in [request for request, _ in decoder.step() if request.is_over]:
            dialog = answering.pop(done)
            tokens = done.output().tokens
            is_finished = len(tokens) and int(tokens[-1]) in target.eos_token_ids
            text, ids = target.processor.answer_of(tokens.tolist())
            dialog.add(TargetAnswer(text, Outcome.answered if is_finished else Outcome.cut, token_ids=ids))
            if not is_asked(dialog):
                yield dialog

"""Our own decoder as the source of the target's answers, several conversations at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import sage
from data_prep.config import RegenerateConfig
from data_prep.conversation import Message
from data_prep.dialog import Dialog, Drive, Outcome, TargetAnswer
from sage.decoding.batch import BatchDecoder
from sage.decoding.generation import Generation
from sage.inputs.media import open_image_part, open_video_part
from sage.runtime.executors import passes_as
from sage.runtime.modes import PassMode


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
            try:
                opened = _with_open_media(messages, num_frames)
            except ValueError as error:
                dialog.add(TargetAnswer("", Outcome.invalid, str(error)))
                continue
            answering[decoder.add(target.prepare(opened), policy, sampling=sampling, seed=seed)] = dialog
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


def _with_open_media(messages: list[Message], num_frames: int) -> list[Message]:
    """Opens images and videos as training does: the same rotation, the same frames of a video."""

    def opened(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "image":
            return part | {"image": open_image_part(part)}
        if part["type"] == "video":
            video = open_video_part(part, num_frames)
            return {"type": "video", "video": video.frames, "fps": video.fps}  # without `start` and `end`: already applied
        return part

    return [{**message, "content": [opened(part) for part in message["content"]]} for message in messages]

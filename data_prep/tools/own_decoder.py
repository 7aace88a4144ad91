"""Our own decoder as the source of the target's answers, several conversations at a time or one by one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from data_prep.config import RegenerateConfig
from data_prep.conversation import Message
from data_prep.dialog import Answerer, Dialog, Drive, Outcome, TargetAnswer, one_by_one
from sage.inputs.media import open_image_part, open_video_part
from sage.runtime.executors import passes_as
from sage.runtime.modes import PassMode


def own_answers(target: Any, draft: Any, settings: RegenerateConfig, num_frames: int, num_answers: int) -> Drive:
    """Returns the source of the target's answers by our decoder, `settings.batch_size` conversations at a time.

    While it answers, the target's passes run as is fastest for `num_answers` answers.
    """
    if settings.batch_size == 1:
        drive = one_by_one(answerer(target, draft, settings, num_frames))
    else:
        drive = partial(_together, target, draft, settings, num_frames)

    def with_fast_passes(dialogs: Iterator[Dialog]) -> Iterator[Dialog]:
        with passes_as(PassMode.auto, target, num_answers):
            yield from drive(dialogs)

    return with_fast_passes


def answerer(target: Any, draft: Any, settings: RegenerateConfig, num_frames: int) -> Answerer:
    """Returns the function that generates the target's answer, with speculative decoding if there is a draft."""
    import sage

    options = _options(draft, settings)

    def answer(messages: list[Message], seed: int) -> TargetAnswer:
        try:
            opened = with_open_media(messages, num_frames)
        except ValueError as error:
            return TargetAnswer("", Outcome.invalid, str(error))
        return _as_answer(sage.generate(target, draft, target.prepare(opened), seed=seed, **options), target)

    return answer


def _together(
    target: Any, draft: Any, settings: RegenerateConfig, num_frames: int, dialogs: Iterator[Dialog]
) -> Iterator[Dialog]:
    """Answers several conversations at a time, as `Drive`.

    Raises:
        ValueError: they do not fit into the memory of the device.
    """
    import torch

    try:
        yield from _decoded_together(target, draft, settings, num_frames, dialogs)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"regenerate.batch_size={settings.batch_size}: so many conversations at once do not fit into the memory of "
            f"{target.device}; halve it, and the same command continues after the finished answers"
        ) from error


def _decoded_together(
    target: Any, draft: Any, settings: RegenerateConfig, num_frames: int, dialogs: Iterator[Dialog]
) -> Iterator[Dialog]:
    """Decodes the answers of several conversations together; a conversation that ends makes room for the next one."""
    from sage.decoding.batch import BatchDecoder
    from sage.decoding.generation import Generation

    decoder, options = BatchDecoder(target, draft, settings.batch_size), _options(draft, settings)
    answering: dict[Generation, Dialog] = {}

    def is_asked(dialog: Dialog) -> bool:
        """Adds the dialog's next request; returns whether there is one."""
        while (request := dialog.next_request()) is not None:
            try:
                opened = with_open_media(request.messages, num_frames)
            except ValueError as error:
                dialog.add(TargetAnswer("", Outcome.invalid, str(error)))
                continue
            answering[decoder.add(target.prepare(opened), seed=request.seed, **options)] = dialog
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
            dialog.add(_as_answer(done.output(), target))
            if not is_asked(dialog):
                yield dialog


def _options(draft: Any, settings: RegenerateConfig) -> dict[str, Any]:
    """Returns the arguments of `sage.generate` that all answers share."""
    import sage

    policy = settings.policy if draft is not None else "autoregressive"
    return {"policy": policy, "sampling": sage.Sampling.from_attributes(settings)}


def _as_answer(output: Any, target: Any) -> TargetAnswer:
    is_finished = len(output.tokens) and int(output.tokens[-1]) in target.eos_token_ids
    text, ids = target.processor.answer_of(output.tokens.tolist())
    return TargetAnswer(text, Outcome.answered if is_finished else Outcome.cut, token_ids=ids)


def with_open_media(messages: list[Message], num_frames: int) -> list[Message]:
    """Opens images and videos as training does: the same rotation, the same frames of a video."""

    def opened(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "image":
            return part | {"image": open_image_part(part)}
        if part["type"] == "video":
            video = open_video_part(part, num_frames)
            return {"type": "video", "video": video.frames, "fps": video.fps}  # without `start` and `end`: already applied
        return part

    return [{**message, "content": [opened(part) for part in message["content"]]} for message in messages]

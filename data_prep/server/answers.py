"""Answers of OpenAI-compatible servers to many conversations at the same time.

Owns: concurrent conversations, the outcome of a request without an answer. Does not own: HTTP and retries (`client`), the
content of requests and answers (`chat_request`), the check at the start (`check`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from types import TracebackType

from data_prep.config import RegenerateConfig
from data_prep.conversation import Message, media_parts
from data_prep.dialog import AnswerRequest, Dialog, Outcome, TargetAnswer
from data_prep.server.chat_request import MediaPolicy, answer_of, request_messages
from data_prep.server.check import TEXT_PROMPT, ServedTarget, ServerCheck
from data_prep.server.client import AttemptFailed, RequestRefused, ServerError, ServerPool

logger = logging.getLogger(__name__)
NUM_SEARCHED, NUM_TRIED = 64, 4  # conversations that are searched for images at the start, and prompts that are sent


class ServerAnswers:
    """Answers of the servers in `settings.server`; a context manager.

    Args:
        key: API key of the servers; empty: none.
        policy: the images that may be sent.
    """

    def __init__(self, settings: RegenerateConfig, key: str, target: ServedTarget, policy: MediaPolicy) -> None:
        self._settings, self._target, self._policy = settings, target, policy
        self._runner = asyncio.Runner()
        self._pool = ServerPool(settings, key)
        self._check = ServerCheck(self._pool, settings, target, policy)
        self._has_refused = False

    def __enter__(self) -> ServerAnswers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._runner:
            self._runner.run(self._pool.close())

    def check(self) -> str:
        """Checks that every server serves the target; returns its id there."""
        self._runner.run(self._check.check_text())
        return self._check.model

    def drive(self, dialogs: Iterator[Dialog]) -> Iterator[Dialog]:
        """Runs up to `settings.concurrency` dialogs at the same time, see data_prep.dialog; `check` comes first.

        Raises:
            ServerError: the servers do not answer any more, or accept no images.
            OutsideMedia: an image is outside the folders whose images may be sent.
        """
        first = list(itertools.islice(dialogs, NUM_SEARCHED))
        prompts = itertools.islice(self._prompts_with_image(first), NUM_TRIED)
        self._runner.run(self._check.check_images(list(prompts)))
        waiting = itertools.chain(first, dialogs)
        tasks: set[asyncio.Task[Dialog]] = set()
        try:
            while True:
                new = itertools.islice(waiting, self._settings.concurrency - len(tasks))
                tasks |= {self._runner.get_loop().create_task(self._run(dialog)) for dialog in new}
                if not tasks:
                    return
                self._runner.run(_first_done(tasks))
                for task in sorted(filter(asyncio.Task.done, tasks), key=_has_failed):
                    yield task.result()
                    tasks.remove(task)
        finally:
            for task in tasks:
                task.cancel()
                _has_failed(task)  # reads the error, which asyncio would log otherwise

    def _prompts_with_image(self, dialogs: list[Dialog]) -> Iterator[list[Message]]:
        """Yields the first prompts of dialogs that have an image and can be sent."""
        for dialog in dialogs:
            request = dialog.next_request()
            if request is None or not any(part["type"] == "image" for part in media_parts(request.messages)):
                continue
            try:
                request_messages(request.messages, self._policy)
            except ValueError:
                continue
            yield request.messages

    async def _run(self, dialog: Dialog) -> Dialog:
        while (request := dialog.next_request()) is not None:
            dialog.add(await self._answer(request))
        return dialog

    async def _answer(self, request: AnswerRequest) -> TargetAnswer:
        try:
            messages = request_messages(request.messages, self._policy)
        except ValueError as error:
            return TargetAnswer("", Outcome.invalid, str(error))
        options = self._check.options | {"max_tokens": self._settings.max_new_tokens, "seed": request.seed}
        try:
            reply = await self._pool.complete({"model": self._check.model, "messages": messages, **options})
            answer = answer_of(reply, self._target.processor.tokenizer, self._target.end_token_ids)
            return answer or TargetAnswer("", Outcome.failed, "the server's answer is no chat completion")
        except RequestRefused as refusal:
            if not self._has_refused:
                logger.warning("the server refuses a request: %s; further refusals are counted and listed", refusal)
            self._has_refused = True
            return TargetAnswer("", Outcome.refused, f"refused by the server: {refusal}")
        except AttemptFailed as failure:
            return await self._failed(failure)

    async def _failed(self, failure: AttemptFailed) -> TargetAnswer:
        """Returns the outcome of a request at which the server fails although it answers a short text.

        Raises:
            ServerError: the server does not answer a short text either.
        """
        attempts = f"{self._settings.retries + 1} attempts"
        if not (failure.is_busy or failure.is_down):
            try:
                body = {"model": self._check.model, "messages": request_messages(TEXT_PROMPT, self._policy), "max_tokens": 1}
                await self._pool.complete(body)
                return TargetAnswer("", Outcome.failed, f"{attempts} failed: {failure}")
            except (AttemptFailed, RequestRefused):
                pass
        kept = "finished answers are kept, and the same command continues"
        raise ServerError(f"regenerate.server: {attempts} failed in a row: {failure}; {kept}")


async def _first_done(tasks: set[asyncio.Task[Dialog]]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _has_failed(task: asyncio.Task[Dialog]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None

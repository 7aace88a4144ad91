"""Answers of OpenAI-compatible servers to many conversations at the same time.

At the start, `ServerAnswers.check` checks that the servers answer, serve the target, and tokenize its prompts like the target's
processor. Every problem is reported as a `ServerError`: one line with the remedy.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from data_prep.config import RegenerateConfig
from data_prep.conversation import Message, media_parts
from data_prep.dialog import Dialog, Outcome, TargetAnswer
from data_prep.server.client import (
    CHAT,
    MODELS,
    AttemptFailed,
    MediaPolicy,
    RequestRefused,
    Server,
    ServerError,
    ServerPool,
    request_messages,
)
from sage.inputs.processing import Processor
from sage.targets.loading import load_processor
from sage.targets.target import fingerprint_of

logger = logging.getLogger(__name__)
NUM_SEARCHED, NUM_TRIED = 64, 4  # conversations that are searched for images at the start, and prompts that are sent
MAX_LISTED = 200  # characters of the names of models
TEXT_PROMPT: list[Message] = [{"role": "user", "content": [{"type": "text", "text": "Say hello, in 1 word: äöü <b>?"}]}]


@dataclass(frozen=True)
class ServedTarget:
    """What answers of a server depend on: the target's folder or hub id, its `sage.Target.fingerprint`, and its processor."""

    name: str
    fingerprint: dict[str, Any]
    processor: Processor

    @classmethod
    def load(cls, path: str) -> ServedTarget:
        """Reads a target's folder or hub id, without its weights; ValueError as `sage.targets.loading.load_processor`."""
        processor = load_processor(path)
        return cls(path, fingerprint_of(AutoConfig.from_pretrained(path, trust_remote_code=False)), processor)


class ServerAnswers:
    """Answers of the servers in `settings.server`, with the API key `key` (empty: none); a context manager."""

    def __init__(self, settings: RegenerateConfig, key: str, target: ServedTarget, policy: MediaPolicy) -> None:
        self._settings, self._target, self._policy = settings, target, policy
        self._runner = asyncio.Runner()
        self._pool = ServerPool(settings, key)
        self._model = settings.model  # id under which the target is served
        self._options: dict[str, Any] = {}  # of sampling, which all servers accept
        self._has_refused = False

    def __enter__(self) -> ServerAnswers:
        return self

    def __exit__(self, *error: object) -> None:
        with self._runner:
            self._runner.run(self._pool.close())

    def drive(self, dialogs: Iterator[Dialog]) -> Iterator[Dialog]:
        """Runs up to `settings.concurrency` dialogs at the same time, see data_prep.dialog; `check` comes first.

        Raises ServerError if the servers do not answer any more or accept no images, OutsideMedia for an image that may not be
        sent.
        """
        first = list(itertools.islice(dialogs, NUM_SEARCHED))
        self._runner.run(self._check_images(list(itertools.islice(self._prompts_with_image(first), NUM_TRIED))))
        waiting = itertools.chain(first, dialogs)
        tasks: set[asyncio.Task[Dialog]] = set()
        try:
            while True:
                new = itertools.islice(waiting, self._settings.concurrency - len(tasks))
                tasks |= {self._runner.get_loop().create_task(self._run(dialog)) for dialog in new}
                if not tasks:
                    return
                done, tasks = self._runner.run(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
                for task in sorted(done, key=lambda task: task.exception() is not None):
                    yield task.result()
        finally:
            for task in tasks:
                task.cancel()

    def _prompts_with_image(self, dialogs: list[Dialog]) -> Iterator[list[Message]]:
        """Yields the first prompts of dialogs that have an image and can be sent."""
        for dialog in dialogs:
            messages, _ = dialog.next_request() or ([], 0)
            if not any(part["type"] == "image" for part in media_parts(messages)):
                continue
            try:
                request_messages(messages, self._policy)
            except ValueError:
                continue
            yield messages

    async def _run(self, dialog: Dialog) -> Dialog:
        while (request := dialog.next_request()) is not None:
            dialog.add(await self._answer(*request))
        return dialog

    async def _answer(self, messages: list[Message], seed: int) -> TargetAnswer:
        try:
            body = {"model": self._model, "messages": request_messages(messages, self._policy)}
        except ValueError as error:
            return TargetAnswer("", Outcome.invalid, str(error))
        options = self._options | {"max_tokens": self._settings.max_new_tokens, "seed": seed}
        try:
            answer = answer_of(await self._pool.complete(body | options), self._target.processor)
            return answer or TargetAnswer("", Outcome.failed, "the server's answer is no chat completion")
        except RequestRefused as refusal:
            if not self._has_refused:
                logger.warning("the server refuses a request: %s; further refusals are counted and listed", refusal)
            self._has_refused = True
            return TargetAnswer("", Outcome.refused, f"refused by the server: {refusal}")
        except AttemptFailed as failure:
            return await self._failed(failure)

    async def _failed(self, failure: AttemptFailed) -> TargetAnswer:
        """Returns the outcome of a request at which the server fails although it answers a short text, else ServerError."""
        attempts = f"{self._settings.retries + 1} attempts"
        if not (failure.is_busy or failure.is_down):
            try:
                body = {"model": self._model, "messages": request_messages(TEXT_PROMPT, self._policy), "max_tokens": 1}
                await self._pool.complete(body)
                return TargetAnswer("", Outcome.failed, f"{attempts} failed: {failure}")
            except (AttemptFailed, RequestRefused):
                pass
        kept = "finished answers are kept, and the same command continues"
        raise ServerError(f"regenerate.server: {attempts} failed in a row: {failure}; {kept}")

    # -- the check at the start ------------------------------------------------------------------------------------------

    def check(self) -> str:
        """Checks that every server serves the target, with the same tokenizer; returns its id there."""
        accepted = []
        for server in self._pool.servers:
            self._model = self._runner.run(self._served_model(server))
            accepted.append(self._runner.run(self._accepted_options(server)))
        self._options = min(accepted, key=len)
        return self._model

    async def _check_images(self, prompts: list[list[Message]]) -> None:
        """Checks that every server accepts at least one of some prompts with an image."""
        for server in self._pool.servers:
            for number, prompt in enumerate(prompts, 1):
                try:
                    await self._check_prompt(server, prompt, self._options)
                    break
                except RequestRefused as refusal:
                    if number == len(prompts):
                        raise ServerError(
                            f"regenerate.server: {server.name} refuses images: {number} of {number} prompts with one "
                            f"({refusal}); serve the target with images, or choose data without"
                        ) from refusal

    async def _served_model(self, server: Server) -> str:
        """Returns the id of the target on a server."""

        def is_target(name: str | None) -> bool:
            return Path(name or "").name.lower() == Path(self._target.name).name.lower()

        try:
            models = (await self._pool.ask(server, "GET", MODELS))["data"]
            known = {str(model["id"]): model for model in models}
            same = [name for name, model in known.items() if is_target(name) or is_target(model.get("root"))]
        except (RequestRefused, LookupError, TypeError, AttributeError) as error:
            message = f"regenerate.server: {server.name} lists no models; give its URL up to and including /v1"
            raise ServerError(message) from error
        listed = ", ".join(known)[:MAX_LISTED] or "nothing"
        if self._model and self._model not in known:
            raise ServerError(f"regenerate.model={self._model}: {server.name} serves {listed}; give one of these")
        if not self._model and len(same) != 1:
            raise ServerError(
                f"regenerate.server: {server.name} serves {listed}; the target is {self._target.name}; serve that, or if one "
                "of these is the same model, give regenerate.model=ID"
            )
        name = self._model or same[0]
        longest, limit = known[name].get("max_model_len"), self._settings.max_new_tokens
        if isinstance(longest, int) and longest <= limit:
            message = f"regenerate.max_new_tokens={limit}: {server.name} has max_model_len={longest}, prompt included"
            raise ServerError(f"{message}; set a lower value, or serve with a higher one")
        return name

    async def _accepted_options(self, server: Server) -> dict[str, Any]:
        """Returns the sampling options, without those of vLLM if the server accepts only the standard ones."""
        standard: dict[str, Any] = {"temperature": self._settings.temperature, "top_p": self._settings.top_p}
        # Without explicit values, vLLM applies those of generation_config.json.
        of_vllm = {"top_k": self._settings.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}
        of_vllm |= {"skip_special_tokens": False}
        if arguments := self._target.processor.template_arguments:  # a server renders the prompt as training does
            standard["chat_template_kwargs"] = arguments
        try:
            await self._check_prompt(server, TEXT_PROMPT, standard | of_vllm)
            return standard | of_vllm
        except RequestRefused as refusal:
            reason = str(refusal)
        try:
            await self._check_prompt(server, TEXT_PROMPT, standard)
        except RequestRefused as refusal:
            raise ServerError(f"regenerate.server: {server.name} refuses a short text prompt ({refusal})") from refusal
        if self._settings.top_k:
            raise ServerError(f"regenerate.top_k={self._settings.top_k}: {server.name} takes no top_k ({reason}); set it to 0")
        logger.info("%s takes only the standard options: its answers come as text, without token ids", server.name)
        return standard

    async def _check_prompt(self, server: Server, messages: list[Message], options: dict[str, Any]) -> None:
        """Requests one token, and compares the prompt's token ids with the target's, or of a text at least their number."""
        body = {"model": self._model, "messages": request_messages(messages, self._policy), "max_tokens": 1, **options}
        reply = await self._pool.ask(server, "POST", CHAT, body)
        if answer_of(reply, self._target.processor) is None:
            raise ServerError(f"regenerate.server: {server.name}: its answer is no chat completion; give another server")
        expected = self._target.processor.prepare(messages)["input_ids"][0].tolist()
        ids = reply.get("prompt_token_ids")
        count = len(ids or expected)
        if messages is TEXT_PROMPT and not ids:
            count = (reply.get("usage") or {}).get("prompt_tokens") or count
        if count != len(expected) or (ids and ids != expected):
            differs = "as other tokens than" if count == len(expected) else f"as {count} tokens, {len(expected)} with"
            raise ServerError(
                f"regenerate.server: {server.name} reads a prompt {differs} the target {self._target.name}: another tokenizer, "
                "chat template or image size; serve the target itself"
            )


def answer_of(reply: Any, processor: Processor) -> TargetAnswer | None:
    """Returns the answer in a chat completion, by its token ids if the server returns them (vLLM); None if `reply` is none."""
    try:
        choice = reply["choices"][0]
        message, reason, ids = choice["message"], choice["finish_reason"], choice.get("token_ids")
        text, thoughts = message["content"] or "", message.get("reasoning_content") or message.get("reasoning")
    except (LookupError, TypeError):
        return None
    if thoughts:
        is_cut = reason == "length" and not text
        text = f"<think>\n{thoughts}" if is_cut else f"<think>\n{thoughts.strip()}\n</think>\n\n{text}"
    kept_ids: tuple[int, ...] = ()
    if ids:
        text, kept_ids = processor.answer_of(ids)
    if reason == "stop" or (ids and ids[-1] in (*processor.end_token_ids, processor.tokenizer.eos_token_id)):
        return TargetAnswer(text, token_ids=kept_ids)
    if reason == "length":
        return TargetAnswer(text, Outcome.cut, token_ids=kept_ids)
    return TargetAnswer(text, Outcome.refused, f"refused by the server: finish_reason {reason}")

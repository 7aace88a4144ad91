"""What all requests of a server share, and the preparation of one: a body -> prompt tensors and sampling parameters.

Preparation runs in a few threads: images are decoded, resized and normalized, text is tokenized.
"""

from __future__ import annotations

import argparse
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from sage.commands.cli import find_models
from sage.drafts.draft import Draft
from sage.inputs.processing import Processor
from sage.serving.chat_request import ChatRequest, TextPart, read_request
from sage.serving.completion import Completion
from sage.serving.decoding import Decoding, load_plan, plan_decoding
from sage.serving.errors import invalid
from sage.serving.media import MediaReader, RemoteMedia
from sage.serving.metrics import Metrics
from sage.serving.scheduler import Scheduler
from sage.serving.settings import ServerLimits
from sage.targets import Target
from sage.targets.loading import load_processor

NUM_THREADS = 2
TOO_LONG = "context_length_exceeded"  # OpenAI's code


class Service:
    """A target behind the API.

    Args:
        decoding: is waited for; raises ValueError as `Decoding.wait` does.
        processor: of the target.
        model: name of the target.
        api_key: that clients must send; empty: none.
        is_local: whether the server listens on this machine only.
    """

    def __init__(
        self,
        decoding: Decoding,
        processor: Processor,
        model: str,
        limits: ServerLimits,
        api_key: str = "",
        remote: RemoteMedia = RemoteMedia(),  # noqa: B008
        is_local: bool = True,
    ) -> None:
        self.processor, self.model, self.limits, self.remote = processor, model, limits, remote
        self.api_key, self.is_local = api_key, is_local
        self.max_context, self.end_token_ids = decoding.wait()
        self.metrics = Metrics()
        self.scheduler = Scheduler(decoding, limits.max_requests, limits.queue, self.metrics)
        self.pool = ThreadPoolExecutor(NUM_THREADS, "prepare")
        family, self.tokenizer = processor.family, processor.tokenizer
        reserved = {*family.placeholders.values(), *family.slot_texts.values()}
        self._reserved = re.compile("|".join(map(re.escape, sorted(reserved))) or "(?!)")  # without any, it matches nothing
        self._max_characters = self.max_context * max(map(len, self.tokenizer.get_vocab()))  # more have more tokens than fit

    def prepare(self, body: bytes) -> Completion:
        """Returns a request that can be decoded; ApiError for one that cannot."""
        request = read_request(body, self.model, MediaReader(self.limits, self.remote))
        self._check_texts(request)
        try:
            inputs = self.processor.prepare([message.prepared() for message in request.messages])
        except (ValueError, TemplateError) as error:
            raise invalid(f"messages: {error}", "messages") from error
        sampling = request.sampling(self._max_new_tokens(request, inputs["input_ids"].shape[1]))
        return Completion(request, inputs, sampling, self.tokenizer, self.model, self.end_token_ids)

    def _check_texts(self, request: ChatRequest) -> None:
        """Refuses texts that contain a placeholder of an image, or cannot fit into the context."""
        messages = [[part.text for part in one.content if isinstance(part, TextPart)] for one in request.messages]
        num_characters = sum(len(text) for texts in messages for text in texts)
        if num_characters > self._max_characters:
            message = f"messages: {num_characters} characters, which are more than {self.max_context} tokens"
            raise invalid(message, "messages", TOO_LONG)
        for number, texts in enumerate(messages):
            if found := self._reserved.search("\n".join(texts)):
                where = f"messages[{number}].content"
                message = f"{where}: the text contains {found[0]!r}, the placeholder of an image or video; remove it"
                raise invalid(message, where)

    def _max_new_tokens(self, request: ChatRequest, length: int) -> int:
        left = self.max_context - length
        if left < 1:
            message = f"messages: {length} tokens, and prompt and answer have {self.max_context}; shorten the prompt"
            raise invalid(f"{message} or shrink its images", "messages", TOO_LONG)
        wanted = request.max_tokens or left
        if wanted > left:
            message = f"max_tokens: {wanted} and a prompt of {length} tokens exceed {self.max_context}; give at most {left}"
            raise invalid(message, "max_tokens", TOO_LONG)
        return wanted

    def close(self) -> None:
        """Ends the decoding loop and the threads of the preparation."""
        self.scheduler.decoding.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


def load_service(args: argparse.Namespace, limits: ServerLimits, is_local: bool) -> Service:
    """Starts the decoding process, and loads what the server itself needs meanwhile: the processor."""
    torch.set_num_threads(1)  # preparation has threads of its own, and the decoding process needs the processors
    path, folder = find_models(args)
    decoding = Decoding(load_plan, args, path, folder, limits)
    try:
        name = args.model_name or (path if not Path(path).exists() else Path(path).resolve().name)
        remote = RemoteMedia(args.allow_remote_media, limits.max_body_bytes)
        return Service(decoding, load_processor(path), name, limits, args.api_key, remote, is_local)
    except BaseException:
        decoding.kill()
        raise


def new_service(target: Target, draft: Draft | None, policy: str, limits: ServerLimits, model: str, **options: Any) -> Service:
    """Plans the caches, warms up and starts a decoding thread; `options` are further arguments of `Service`.

    Raises:
        ValueError: the caches do not fit, the context is longer than the target's, or the target has no chat template.
    """
    if target.processor is None:
        raise ValueError("target: has no processor, so it takes no messages; use sage.load_target(path)")
    decoding = Decoding(plan_decoding, target, draft, policy, limits, in_process=False)
    return Service(decoding, target.processor, model, limits, **options)

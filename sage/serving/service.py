"""What all requests of a server share, and the preparation of one: a body -> prompt tensors and sampling parameters.

Preparation runs in a few threads: images are decoded, resized and normalized, text is tokenized. Requests that download images
have threads of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from sage.commands.cli import find_models
from sage.drafts.draft import Draft
from sage.inputs.processing import Processor
from sage.io.ranges import from_attributes
from sage.serving.completion import Completion
from sage.serving.decoder_process import DecoderProcess, load_plan, plan_decoding
from sage.serving.errors import ApiError, invalid
from sage.serving.media import MediaReader, RemoteMedia
from sage.serving.request import ChatRequest, CompletionRequest, greeting_body, read_request
from sage.serving.scheduler import Metrics, Scheduler
from sage.serving.settings import Access, ServerLimits
from sage.targets import Target
from sage.targets.loading import load_processor

NUM_THREADS, NUM_DOWNLOADING = 2, 8
TOO_LONG = "context_length_exceeded"  # OpenAI's code
REMOTE = re.compile(rb'(?i)"https?:')  # in a body: the beginning of a URL


class Service:
    """A target behind the API.

    Args:
        process: is waited for; raises ValueError as `DecoderProcess.wait` does.
        processor: of the target.
        model: name of the target.
    """

    def __init__(self, process: DecoderProcess, processor: Processor, model: str, limits: ServerLimits, access: Access) -> None:
        self.processor, self.model, self.limits, self.access = processor, model, limits, access
        self._remote = RemoteMedia(access.allow_remote_media, limits.max_body_bytes)
        self.max_context, self.end_token_ids = process.wait()
        self.metrics = Metrics(model, process.pid)
        self.scheduler = Scheduler(process, limits.max_requests, limits.queue, self.metrics)
        self._pool = ThreadPoolExecutor(NUM_THREADS, "prepare")
        self._downloads = ThreadPoolExecutor(NUM_DOWNLOADING, "download")
        self._max_characters = self.max_context * max(map(len, processor.tokenizer.get_vocab()))  # more are too many tokens
        for body in (greeting_body(False), greeting_body(True)):  # so that the first request takes no longer than others
            with suppress(ApiError):  # no images, or their tokens exceed the context
                self._prepare(ChatRequest, body, RemoteMedia())

    async def prepared(self, kind: type[CompletionRequest], body: bytearray) -> Completion:
        """Returns a request that can be decoded, prepared in a thread; ApiError for one that cannot."""
        is_remote = self._remote.hosts and REMOTE.search(body)
        pool, remote = (self._downloads, self._remote) if is_remote else (self._pool, RemoteMedia())
        return await asyncio.get_running_loop().run_in_executor(pool, self._prepare, kind, body, remote)

    def _prepare(self, kind: type[CompletionRequest], body: bytearray, remote: RemoteMedia) -> Completion:
        reader = MediaReader(self.limits, remote)
        request = read_request(kind, body, self.model, reader, self.access.ignore_unknown_fields)
        if (num_characters := request.num_characters()) > self._max_characters:
            raise self._too_long(request, f"{num_characters} characters, which are more tokens")
        try:
            inputs = request.prepared(self.processor)
        except (ValueError, TemplateError) as error:
            raise invalid(f"{request.subject}: {error}", request.subject) from error
        length = inputs["input_ids"].shape[1]
        left = self.max_context - length
        if left < 1:
            raise self._too_long(request, f"{length} tokens; shorten the prompt or shrink its images")
        max_tokens = request.max_tokens or left
        if max_tokens > left:
            message = f"max_tokens: {max_tokens} and a prompt of {length} tokens exceed the maximum context length of"
            raise invalid(f"{message} {self.max_context} tokens; give at most {left}", "max_tokens", TOO_LONG)
        return Completion(request, inputs, max_tokens, self.processor.tokenizer, self.model, self.end_token_ids)

    def _too_long(self, request: CompletionRequest, amount: str) -> ApiError:
        text = f"this model's maximum context length is {self.max_context} tokens, and the prompt has {amount}"
        return invalid(f"{request.subject}: {text}", request.subject, TOO_LONG)

    def close(self) -> None:
        """Ends the decoding loop and the threads of the preparation."""
        self.scheduler.process.close()
        for pool in (self._pool, self._downloads):
            pool.shutdown(wait=False, cancel_futures=True)


def load_service(args: argparse.Namespace, limits: ServerLimits, is_local: bool) -> Service:
    """Starts the decoding process, and loads what the server itself needs meanwhile: the processor."""
    torch.set_num_threads(1)  # preparation has threads of its own, and the decoding process needs the processors
    path, folder = find_models(args)
    process = DecoderProcess(load_plan, args, path, folder, limits)
    try:
        name = args.model_name or (path if not Path(path).exists() else Path(path).resolve().name)
        return Service(process, load_processor(path), name, limits, from_attributes(Access, args, is_local=is_local))
    except BaseException:
        process.kill()
        raise


def new_service(target: Target, draft: Draft | None, policy: str, limits: ServerLimits, model: str, **options: Any) -> Service:
    """Plans the caches, warms up and starts a decoding thread; ValueError as of `plan_decoding`. `options`: of `Access`."""
    if target.processor is None:
        raise ValueError("target: has no processor, so it takes no messages; use sage.load_target(path)")
    process = DecoderProcess(plan_decoding, target, draft, policy, limits, in_thread=True)
    return Service(process, target.processor, model, limits, Access(**options))

"""What all requests of a server share, and the preparation of one: a body -> prompt tensors and sampling parameters.

Preparation runs in a few threads: images are decoded, resized and normalized, text is tokenized.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from sage.decoding.settings import Sampling
from sage.inputs.processing import Processor
from sage.serving.chat_request import ChatRequest, TextPart, read_request
from sage.serving.errors import invalid
from sage.serving.media import MediaReader
from sage.serving.metrics import Metrics
from sage.serving.remote import RemoteMedia
from sage.serving.scheduler import Scheduler
from sage.serving.settings import ServerLimits

NUM_THREADS = 2
TOO_LONG = "context_length_exceeded"  # OpenAI's code


@dataclass
class Prepared:
    """A request that can be decoded.

    Attributes:
        inputs: of `Target.prepare`.
    """

    request: ChatRequest
    inputs: Any
    sampling: Sampling

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return int(self.inputs["input_ids"].shape[1])


@dataclass
class Service:
    """A target behind the API.

    Attributes:
        processor: of the target.
        model: name of the target.
        end_token_ids: ids that end an answer.
        max_context: tokens of a prompt and its answer.
        api_key: that clients must send; empty: none.
        is_local: whether the server listens on this machine only.
    """

    processor: Processor
    model: str
    end_token_ids: tuple[int, ...]
    scheduler: Scheduler
    limits: ServerLimits
    max_context: int
    metrics: Metrics
    api_key: str = ""
    remote: RemoteMedia = RemoteMedia()
    is_local: bool = True
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(NUM_THREADS, "prepare"))

    def __post_init__(self) -> None:
        family, self.tokenizer = self.processor.family, self.processor.tokenizer
        reserved = {*family.placeholders.values(), *family.slot_texts.values()}
        self._reserved = re.compile("|".join(map(re.escape, sorted(reserved))) or "(?!)")  # without any, it matches nothing
        self._max_characters = self.max_context * max(map(len, self.tokenizer.get_vocab()))  # more have more tokens than fit

    def prepare(self, body: bytes) -> Prepared:
        """Returns a request that can be decoded; ApiError for one that cannot."""
        request = read_request(body, self.model)
        self._check_texts(request)
        messages = MediaReader(self.limits, self.remote).open_messages(request.messages)
        try:
            inputs = self.processor.prepare(messages)
        except (ValueError, TemplateError) as error:
            raise invalid(f"messages: {error}", "messages") from error
        length = int(inputs["input_ids"].shape[1])
        return Prepared(request, inputs, request.sampling(self._max_new_tokens(request, length)))

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

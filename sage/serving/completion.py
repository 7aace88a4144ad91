"""Tokens of an answer -> text without its stop string, chunks of a stream, the complete response, usage."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from sage.decoding.answer import Stats
from sage.decoding.detokenizer import Detokenizer
from sage.serving.service import Prepared, Service

DONE = b"data: [DONE]\n\n"


class StopStrings:
    """Cuts a text at the first stop string; holds back an end that a stop string may begin with."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_found = False

    def feed(self, text: str, is_last: bool = False) -> str:
        """Returns the text that can be sent, given the next piece of it."""
        if not self._stops or self.is_found:
            return "" if self.is_found else text
        text = self._held + text
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.is_found, self._held = True, ""
            return text[: min(starts)]
        length = 0 if is_last else max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - length
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that `stop` begins with; less than all of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass
class Completion:
    """The answer to one request, built from its tokens."""

    service: Service
    prepared: Prepared
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    tokens: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.service.tokenizer)
        self._stops = StopStrings(self.prepared.request.stop)

    def add(self, result: list[int] | Stats) -> str:
        """Appends tokens, or ends the answer with its `Stats`; returns the text to send."""
        is_last = isinstance(result, Stats)
        if isinstance(result, Stats):
            self.stats = result
        else:
            self.tokens += result
        return self._stops.feed(self._detokenizer.next_piece(self.tokens, len(self.tokens), is_last), is_last)

    @property
    def finish_reason(self) -> str:
        """Of a complete answer: `stop` after an end token or a stop string, else `length`."""
        ends: Collection[int] = self.service.end_token_ids
        return "stop" if self._stops.is_found or self.tokens[-1] in ends else "length"

    def response(self, text: str) -> dict[str, Any]:
        """Returns the complete response."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.finish_reason}
        found = self._head("chat.completion") | {"choices": [choice | self._ids(self.tokens)], "usage": usage(self.stats)}
        if self.prepared.request.return_token_ids:
            found["prompt_token_ids"] = self.prepared.inputs["input_ids"][0].tolist()
        return found

    def first_chunk(self) -> bytes:
        """Returns the chunk that names the role."""
        return self._chunk({"role": "assistant", "content": ""}, None, ())

    def text_chunk(self, text: str, tokens: Sequence[int]) -> bytes:
        """Returns a chunk of text."""
        return self._chunk({"content": text}, None, tokens)

    def last_chunks(self) -> bytes:
        """Returns the chunks after the text."""
        end = self._chunk({}, self.finish_reason, ())
        if self.prepared.request.stream_options.include_usage:
            end += _event(self._head("chat.completion.chunk") | {"choices": [], "usage": usage(self.stats)})
        return end + DONE

    def _chunk(self, delta: dict[str, Any], reason: str | None, tokens: Sequence[int]) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason} | self._ids(tokens)
        content = self._head("chat.completion.chunk") | {"choices": [choice]}
        return _event(content | ({"usage": None} if self.prepared.request.stream_options.include_usage else {}))

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.service.model}

    def _ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(tokens)} if self.prepared.request.return_token_ids else {}


def error_chunk(content: Any) -> bytes:
    """Returns the end of a stream that failed after its first chunk."""
    return _event(content) + DONE


def usage(stats: Stats) -> dict[str, Any]:
    """Returns the tokens of a request, and what speculation has made of them."""
    accepted = sum(stats.accepted)
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.new_tokens,
        "total_tokens": stats.prompt_tokens + stats.new_tokens,
        "speculation": {
            "rounds": stats.rounds,
            "draft_steps": stats.draft_steps,
            "accepted_tokens": accepted,
            "tokens_per_target_pass": round(stats.tokens_per_target_pass, 4),
        },
    }


def _event(content: Any) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"

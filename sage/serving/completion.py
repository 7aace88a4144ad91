"""Tokens of an answer -> text without its stop string -> the body of the response: chunks of a stream, or all of it."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from itertools import accumulate
from typing import Any

from sage.decoding.answer import Detokenizer, Stats
from sage.serving.decoder_process import Emitted
from sage.serving.errors import ApiError
from sage.serving.request import CompletionRequest, TextRequest

DONE = b"data: [DONE]\n\n"
CHAT_ROLE = {"role": "assistant", "content": ""}


class StopStrings:
    """Cuts a text at the first stop string; holds back an end that a stop string may begin with."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_found = False

    def feed(self, text: str, is_last: bool = False) -> str:
        """Returns the text that can be sent, given the next piece of it."""
        if self.is_found:
            return ""
        text = self._held + text
        starts = [text.index(stop) for stop in self._stops if stop in text]
        beginnings = [stop[:n] for stop in self._stops for n in range(1, len(stop))] if not is_last else []
        num_held = max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
        end = min(starts, default=len(text) - num_held)
        self.is_found, self._held = bool(starts), text[end:]
        return text[:end]


class Completion:
    """A request that can be decoded, with `inputs` of `Target.prepare`, and its answer, built from its tokens."""

    def __init__(
        self, request: CompletionRequest, inputs: Any, max_tokens: int, tokenizer: Any, model: str, end_token_ids: Sequence[int]
    ) -> None:
        self.request, self.inputs, self._end_token_ids = request, inputs, end_token_ids
        self.sampling = request.sampling(max_tokens)
        self._is_chat = request.subject == "messages"
        kind, name = ("chatcmpl", "chat.completion") if self._is_chat else ("cmpl", "text_completion")
        name += ".chunk" if self._is_chat and request.stream else ""
        self._head = {"id": f"{kind}-{uuid.uuid4().hex}", "object": name, "created": int(time.time()), "model": model}
        self._detokenizer, self._stops, self._tokenizer = Detokenizer(tokenizer), StopStrings(request.stop), tokenizer
        self._tokens: list[int] = []
        self._scores: list[Any] = []  # log-probabilities that are not sent yet
        self._num_characters = 0  # of the tokens whose log-probabilities are sent
        self._prompt: list[int] = inputs["input_ids"][0].tolist() if isinstance(request, TextRequest) and request.echo else []
        self.options = {"num_logprobs": request.num_logprobs, "with_prompt": bool(self._prompt)}

    async def parts(self, results: AsyncIterator[Emitted | Stats]) -> AsyncGenerator[bytes]:
        """Yields the body of the response, given new tokens and the `Stats` at the end."""
        text, is_stream = "", self.request.stream
        async for result in results:
            if is_stream and self._is_chat and not self._tokens:
                yield self._chunk(CHAT_ROLE)
            is_last, (tokens, scores) = isinstance(result, Stats), ((), ()) if isinstance(result, Stats) else result
            piece = "" if self._tokens else self._decode(self._prompt)
            self._scores += [[(token, None)] for token in self._prompt[:1] if scores and not self._tokens] + [*scores]
            self._tokens += tokens
            piece += self._stops.feed(self._detokenizer.next_piece(self._tokens, len(self._tokens), is_last), is_last)
            if is_stream and (piece or (tokens and (self.request.return_token_ids or scores))):
                yield self._chunk({"content": piece}, tokens)
            text += piece
            if isinstance(result, Stats):
                yield self._end(text, result)

    def summary(self) -> str:
        """Returns the numbers of tokens, for the log."""
        return f"prompt {self.inputs['input_ids'].shape[1]}, answer {len(self._tokens)} tokens"

    def _end(self, text: str, stats: Stats) -> bytes:
        """Returns the complete body, or the last events of a stream."""
        is_stopped = self._stops.is_found or self._tokens[-1] in self._end_token_ids
        reason = "stop" if is_stopped else "length"
        if self.request.stream:
            total = _event({**self._head, "choices": [], "usage": usage(stats)})
            return self._chunk({}, (), reason) + (total if self.request.stream_options.include_usage else b"") + DONE
        choice = self._choice("message", {"role": "assistant", "content": text, "refusal": None}, self._tokens, reason)
        content = {**self._head, "choices": [choice], "usage": usage(stats)}
        if self.request.return_token_ids:
            content["prompt_token_ids"] = self.inputs["input_ids"][0].tolist()
        return json.dumps(content, ensure_ascii=False).encode()

    def _chunk(self, delta: dict[str, Any], tokens: Sequence[int] = (), reason: str | None = None) -> bytes:
        content = {**self._head, "choices": [self._choice("delta", delta, tokens, reason)]}
        return _event(content | ({"usage": None} if self.request.stream_options.include_usage else {}))

    def _choice(self, key: str, content: dict[str, Any], tokens: Sequence[int], reason: str | None) -> dict[str, Any]:
        part = {key: content} if self._is_chat else {"text": content.get("content", "")}
        choice = {"index": 0, **part, "logprobs": self._logprobs(), "finish_reason": reason}
        return choice | ({"token_ids": list(tokens)} if self.request.return_token_ids else {})

    def _logprobs(self) -> dict[str, Any] | None:
        """Returns the log-probabilities that are not sent yet, in the format of the API."""
        if not self._scores:
            return None
        scores, self._scores = [[(self._decode([token]), score) for token, score in one] for one in self._scores], []
        if self._is_chat:
            return {"content": [_score(one[0]) | {"top_logprobs": [*map(_score, one[1:])]} for one in scores]}
        texts = [one[0][0] for one in scores]
        *offsets, self._num_characters = accumulate(map(len, texts), initial=self._num_characters)
        own, top = [one[0][1] for one in scores], [None if one[0][1] is None else dict(one[::-1]) for one in scores]
        return {"tokens": texts, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))


def _score(entry: tuple[str, float | None]) -> dict[str, Any]:
    return {"token": entry[0], "logprob": entry[1], "bytes": [*entry[0].encode()]}


def error_event(error: ApiError) -> bytes:
    """Returns the end of a stream that failed after its first part."""
    return b"data: " + error.body() + b"\n\n" + DONE


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


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()

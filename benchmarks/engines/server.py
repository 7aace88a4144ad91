"""A running OpenAI-compatible server as a decoder of the comparison: requests one at a time, streamed, timed by the client.

URL and key reach no message, log or file. The counters of vLLM's `/metrics` include requests of other clients: measure a server
without any.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.engines.comparison import Answer
from data_prep.config import KEY_VARIABLE, is_key, url_problem
from data_prep.server.client import keep_urls_out_of_logs, server_message

SERVER = "server"
TIMEOUT_S = 600.0
REMEDY = "give the URL of an OpenAI-compatible server"
COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens_per_pos)_total\{(.*)\} (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')


def counted(text: str) -> Counter[int]:
    """Reads vLLM's counters of speculative decoding, summed over engines, from the content of `/metrics`.

    Returns:
        0 -> rounds; 1, 2, .. -> how many of them accepted this position; empty where there are no such counters.
    """
    counts = Counter[int]()
    for name, labels, value in COUNTER.findall(text):
        if name == "drafts":
            counts[0] += int(float(value))
        elif found := POSITION.search(labels):
            counts[1 + int(found[1])] += int(float(value))
    return counts


class Refused(ValueError):
    """The server does not accept a request."""


class ServerClient:
    """Requests to one server; a context manager. Raises ValueError for an address or key that cannot be used.

    Args:
        url: of the server, with or without `/v1`.
        key: sent as bearer token; empty: none.
    """

    def __init__(self, url: str, key: str) -> None:
        if problem := url_problem(url, KEY_VARIABLE):
            raise ValueError(f"--server: {problem}; give for example http://localhost:8000/v1")
        if not is_key(key):
            raise ValueError(f"{KEY_VARIABLE}: has a line break, a blank or another character that no key has; export it again")
        self._root = url.rstrip("/").removesuffix("/v1")
        keep_urls_out_of_logs()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._secrets = [text for text in (key, self._root, urlsplit(self._root).netloc) if text]
        fresh = httpx.Limits(max_keepalive_connections=0)  # servers close idle connections while another decoder has its turn
        self._client = httpx.Client(headers=headers, timeout=TIMEOUT_S, limits=fresh)

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def models(self) -> list[str]:
        """Returns the names of the served models."""
        try:
            response = self._client.get(f"{self._root}/v1/models").raise_for_status()
            return [str(model["id"]) for model in response.json()["data"]]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ValueError(f"--server: its /v1/models is no list of models; {REMEDY}") from error

    def counters(self) -> Counter[int]:
        """Returns `counted`; empty where the server reports nothing."""
        try:
            response = self._client.get(f"{self._root}/metrics")
        except httpx.HTTPError:
            return Counter()
        return counted(response.text) if response.is_success else Counter()

    def stream(self, body: Mapping[str, Any]) -> Iterator[Any]:
        """Yields the chunks of a chat completion as they arrive.

        Raises:
            Refused: the server does not accept the request.
            ValueError: it is down or answers something else.
        """
        try:
            with self._client.stream("POST", f"{self._root}/v1/chat/completions", json={**body, "stream": True}) as response:
                if not response.is_success:
                    response.read()
                    reason = server_message(response, self._secrets) or "no reason"
                    remedy = f"; export its key in {KEY_VARIABLE}" if response.status_code in (401, 403) else ""
                    raise Refused(f"--server: answers {response.status_code}: {reason}{remedy}")
                for line in response.iter_lines():
                    if line.startswith("data:") and (data := line.removeprefix("data:").strip()) != "[DONE]":
                        yield json.loads(data)
        except httpx.HTTPError as error:
            is_down = isinstance(error, httpx.ConnectError)
            reason = "no connection; start it" if is_down else "the connection was cut; see its log"
            if isinstance(error, httpx.TimeoutException):
                reason = f"no answer within {TIMEOUT_S:.0f} s; see its log"
            raise ValueError(f"--server: {reason}") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"--server: its answer is no stream of JSON; {REMEDY}") from error


@dataclass
class ServerDecoder:
    """A server in the comparison."""

    client: ServerClient
    model: str  # its name on the server
    questions: Sequence[Any]  # messages of each prompt, as the API takes them
    tokenizer: Any  # of the target, for the answers of servers that return no token ids
    eos: int  # appended to an answer that ended by itself, where there are no token ids
    max_new_tokens: int
    extensions: Mapping[str, Any] = field(default_factory=lambda: {"return_token_ids": True})  # of vLLM, in every request

    def turn(self) -> list[Answer]:
        """Decodes every prompt."""
        return [self.answer(question) for question in self.questions]

    def answer(self, question: Any) -> Answer:
        """Decodes one prompt; ValueError for an empty answer."""
        settings = {"temperature": 0.0, "max_tokens": self.max_new_tokens, **self.extensions}
        body = {"model": self.model, "messages": question, **settings}
        ids, text, reason = list[int](), "", ""
        start = time.perf_counter()
        first = last = 0.0
        for chunk in self.client.stream(body):
            if not (choices := chunk.get("choices")):
                continue
            piece, new = choices[0].get("delta", {}).get("content") or "", choices[0].get("token_ids") or []
            if piece or new:
                last = time.perf_counter()
                first = first or last
            ids, text, reason = ids + new, text + piece, choices[0].get("finish_reason") or reason
        if not first:
            raise ValueError("--server: an empty answer; its model has to answer these prompts")
        if not ids:
            ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], *([self.eos] if reason == "stop" else [])]
        return Answer(ids, last - first, last - start)


def served_model(client: ServerClient, name: str | None) -> str:
    """Returns the model to request; ValueError if the server does not serve it, or several and none is chosen."""
    models = client.models()
    if name is None and len(models) == 1:
        return models[0]
    if name is None or name not in models:
        given = "" if name is None else f" {name}: not served"
        raise ValueError(f"--server-model{given}: choose from {', '.join(models) or 'none, the server has no model'}")
    return name

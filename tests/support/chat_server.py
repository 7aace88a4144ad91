"""An OpenAI-compatible server in a thread that simulates failures, for tests of answers from a server.

Its model is a function of messages and seed. Token ids of prompts are those of a processor, so images have to arrive.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

from data_prep.conversation import Message
from data_prep.dialog import Outcome, TargetAnswer
from data_prep.sources.layouts import table_messages
from sage.inputs.processing import Processor

MODEL = "models/toy"


@dataclass
class Reply:
    """A response in place of an answer; `action` is empty, "cut" (close the connection) or "garbage" (not JSON)."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    action: str = ""


@dataclass
class ChatServer:
    """The model and the failures of the server, which a test may change while it runs, and the requests it has received."""

    processor: Processor
    answer: Callable[[list[Message], int], TargetAnswer]  # the model
    url: str = ""
    # takes the number of the chat request, from 0 on, and its body; None: answers
    fault: Callable[[int, Any], Reply | None] = lambda number, body: None
    extensions: bool = True  # whether it takes vLLM's options and returns token ids
    takes_images: bool = True  # otherwise it refuses them with status 400
    # the answer to GET /v1/models
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": MODEL, "root": MODEL, "max_model_len": 2048}])
    requests: list[Any] = field(default_factory=list)  # bodies of all chat requests
    keys: list[str | None] = field(default_factory=list)  # values of the header Authorization
    num_active: int = 0
    most_active: int = 0  # largest number of chat requests at the same time
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def prompts(self) -> list[Any]:
        """The requests without those of the check at the start."""
        return [body for body in self.requests if "seed" in body]

    def chat(self, body: Any) -> Reply:
        with self.lock:
            number = len(self.requests)
            self.requests.append(body)
            self.num_active += 1
            self.most_active = max(self.most_active, self.num_active)
        try:
            if (fault := self.fault(number, body)) is not None:
                return fault
            return self._completion(body)
        finally:
            with self.lock:
                self.num_active -= 1

    def _completion(self, body: Any) -> Reply:
        if not self.extensions and {"top_k", "return_token_ids", "repetition_penalty"} & body.keys():
            return refusal("unknown parameter")
        messages = table_messages({"messages": body["messages"]}, {}, "")
        if not self.takes_images and any(part["type"] == "image" for message in messages for part in message["content"]):
            return refusal("At most 0 image(s) may be provided in one prompt")
        found = self.answer(messages, body.get("seed", 0))
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": found.text}}
        choice["finish_reason"] = "length" if found.outcome is Outcome.cut else "stop"
        ids = self.processor.prepare(messages)["input_ids"][0].tolist()
        reply = {"choices": [choice], "usage": {"prompt_tokens": len(ids)}}
        if body.get("return_token_ids"):
            end = [] if found.outcome is Outcome.cut else [self.processor.tokenizer.eos_token_id]
            choice["token_ids"] = [*self.processor.tokenizer(found.text)["input_ids"], *end]
            reply["prompt_token_ids"] = ids
        return Reply(body=reply)


def refusal(message: str, status: int = 400, **headers: str) -> Reply:
    """Returns a reply with an error as OpenAI and vLLM write it."""
    return Reply(status, {"error": {"message": message}}, {name.replace("_", "-"): value for name, value in headers.items()})


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores connections that the client has closed."""


class JsonHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one packet, which otherwise wait for each other

    def received(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def send(self, status: int, data: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serves with a handler on a free port; yields the address."""
    with QuietServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def serving(processor: Processor, answer: Callable[[list[Message], int], TargetAnswer], **options: Any) -> Iterator[ChatServer]:
    chat = ChatServer(processor, answer, **options)

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            self._reply(Reply(body={"data": chat.models}) if self.path == "/v1/models" else refusal("Not Found", 404))

        def do_POST(self) -> None:
            chat.keys.append(self.headers.get("Authorization"))
            body = self.received()
            self._reply(chat.chat(body) if self.path == "/v1/chat/completions" else refusal("Not Found", 404))

        def _reply(self, reply: Reply) -> None:
            if reply.action == "cut":
                self.close_connection = True
                return
            data = b"<html>" if reply.action == "garbage" else json.dumps(reply.body).encode()
            self.send(reply.status, data, reply.headers)

    with listening(Handler) as address:
        chat.url = f"{address}/v1"
        yield chat

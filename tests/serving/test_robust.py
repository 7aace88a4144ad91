"""Clients that make mistakes, leave, or are too many; keys, hosts; the signal to stop."""

import base64
import json
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.messages import exit_code
from support.serving_helpers import HELLO, Running, data_url, image_url, wait_until, with_images

from sage.decoding.batch import BatchDecoder
from sage.serving import command, completion, scheduler
from sage.serving import server as server_module
from sage.serving.app import CHAT
from sage.serving.completion import StopStrings
from sage.serving.decoder_process import check_caches
from sage.serving.errors import ApiError

LONG = {"max_tokens": 60, "ignore_eos": True}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds take at least 10 ms."""
    step = BatchDecoder.step

    def slower(self: BatchDecoder) -> Any:
        time.sleep(0.01)
        return step(self)

    monkeypatch.setattr(BatchDecoder, "step", slower)


def running(server: Running) -> int:
    return len(server.service.scheduler.running)


def lines(server: Running, **fields: Any) -> Iterator[str]:
    """The lines of a stream; closing the generator closes the connection."""
    body = {"messages": HELLO, "stream": True, **LONG, **fields}
    with (
        httpx.Client(base_url=server.url, timeout=20) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as reply,
    ):
        assert reply.status_code == 200, reply.read()
        yield from (line for line in reply.iter_lines() if line)


JSON = "application/json"
WRONG: dict[str, list[Any]] = {  # field -> values that are not allowed
    "messages": ["Hi", [], [1], [{}], [{"role": "user"}], [{"role": "tool", "content": "x"}]],
    "max_tokens": [0, 1.5, "8", True, 10**9, 10**40],
    "max_completion_tokens": [0],
    "temperature": [-1, 2.5, "hot", 10**400, 1e-30, True],
    "top_p": [0, 1.1],
    "top_k": [-2, 1.5],
    "min_p": [-1, 2],
    "repetition_penalty": [1e-300, 1e300],
    "seed": [2**63, -(2**70), 10**300],
    "stop": [1, [1], [""], "x" * 5000, ["x"] * 100, "\ud800"],
    "n": [2, True],
    "stream": ["yes", 1],
    "stream_options": [1, {"gone": True}, {"include_usage": 3}],
    "logit_bias": [{"5": 1}],
    "response_format": [{"type": "json_object"}],
    "tools": [[{"type": "function"}]],
    "min_tokens": [-1],
    "model": ["gone", 1],
    "audio": [{}],
    "unknown_field": [1],
}
URLS = (
    *("", "data:", "data:image/png;base64,", "data:image/png;base64,@@", "data:image/png,abc", f"{image_url()}\u00e9"),
    *("file:///etc/passwd", "/etc/passwd", "http://127.0.0.1/x.png", "http://169.254.169.254/", "ftp://x/y", None, 1),
)
TRUNCATED = data_url(base64.b64decode(image_url().partition(",")[2])[:80])
PARTS: tuple[Any, ...] = (
    *(1, "x", {"type": "text"}, {"type": "text", "text": 1}, {"type": "input_audio"}, {"type": "image_url", "image_url": {}}),
    *({"type": "video", "video": []}, {"type": "video", "video": "x.mp4"}, {"type": "video", "video": [image_url()], "fps": 0}),
)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes with this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def malformed() -> Iterator[tuple[str, bytes, str]]:
    """Yields requests as (name, body, content type)."""
    for text in (b"", b"[]", b"\xff\xfe", b"{", b'{"a": NaN}', b"[" * 100_000, b"9" * 100_000):
        yield f"body {text[:10]!r}", text, JSON
    hello = [{"role": "user", "content": "Hello"}]
    yield "form", json.dumps({"messages": hello}).encode(), "application/x-www-form-urlencoded"
    for name, values in WRONG.items():
        for value in values:
            yield f"{name}={value!r}"[:60], json.dumps({"messages": hello, "max_tokens": 4, name: value}).encode(), JSON
    for label, messages in _conversations():
        yield label, json.dumps({"messages": messages, "max_tokens": 4}).encode(), JSON


def _conversations() -> Iterator[tuple[str, Any]]:
    for size in ((60_000, 60_000), (20_000, 20_000), (5000, 3), (1, 1), (0, 5), (100, 100)):
        yield f"bomb {size}", with_images("What?", data_url(bomb(*size)))
    for url in (*URLS, data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n", "eps"), data_url(b"<svg/>", "svg+xml"), TRUNCATED):
        yield f"image {url}"[:40], with_images("What?", url)
    for content in (None, 1, [], " ", "\ud800", "a b " * 250_000, *([part] for part in PARTS)):
        yield f"content {content!r}"[:60], [{"role": "user", "content": content}]
    yield "too many images", with_images("What?", *[image_url()] * 200)
    yield "tool calls", [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]


@pytest.mark.slow
def test_malformed_requests_are_refused_in_one_line_and_harm_no_other(server: Running) -> None:
    expected = server.chat(**LONG).json()["choices"]
    with ThreadPoolExecutor(1) as pool:
        others = [pool.submit(server.chat, **LONG) for _ in range(8)]
        for name, body, kind in malformed():
            reply = server.client.post("/v1/chat/completions", content=body, headers={"content-type": kind})
            error = reply.json()["error"]
            assert 400 <= reply.status_code < 500, (name, reply.text)
            assert error["message"] and "\n" not in error["message"] and len(error["message"]) <= 400, name
        assert all(other.result().json()["choices"] == expected for other in others)


@pytest.mark.parametrize(
    ("messages", "fields", "status", "words"),
    [
        (with_images("?", image_url((500, 500))), {}, 400, "500x500 pixels, allowed in a request: 40000"),
        (HELLO, {"max_tokens": 500}, 400, "give at most"),
        (HELLO, {"model": "gone"}, 404, "'gone' is not served; give 'toy'"),
        (HELLO, {"temprature": 1}, 400, "did you mean temperature?"),
        (
            [with_images("?", image_url((8, 8)))[0] | {"role": "system"}, *HELLO],
            {},
            400,
            "message 0: an image or video in a message of role 'system'",
        ),
        ([{"role": "user", "content": "a " * 800}], {}, 400, "maximum context length is 400 tokens"),
        (HELLO, {"metadata": [[]] * 60_000}, 400, "more than 50000 commas"),
        (
            with_images("?", image_url((60, 60))),
            {"mm_processor_kwargs": {"max_pixels": 3000}},
            400,
            "would resize 60x60 pixels",
        ),
        ([{"role": "user", "content": "x" * 3_000_000}], {}, 413, "more than 2000000 bytes"),
    ],
)
def test_refusals_name_field_and_remedy(server: Running, messages: Any, fields: Any, status: int, words: str) -> None:
    reply = server.chat(messages, **fields)
    assert reply.status_code == status and words in reply.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.usefixtures("slow")
def test_a_client_that_leaves_frees_its_place_and_others_keep_their_text(server: Running) -> None:
    expected = server.chat(**LONG).json()["choices"]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.chat, **LONG)
        stream = lines(server, max_tokens=300)
        for _ in range(4):
            next(stream)
        assert running(server) == 2
        stream.close()
        wait_until(lambda: running(server) <= 1)
        assert not other.done() and other.result().json()["choices"] == expected
    assert 'sage_answers_total{end="cancelled"}' in server.client.get("/metrics").text


@pytest.mark.slow
@pytest.mark.usefixtures("slow")
def test_a_full_queue_and_two_signals_to_stop(new, monkeypatch, capsys):
    exits: list[int] = []
    monkeypatch.setattr(server_module.os, "_exit", exits.append)
    with new(limits={"max_requests": 1, "queue": 1}) as server, ThreadPoolExecutor(1) as pool:
        stream = lines(server)
        next(stream)
        waiting = pool.submit(server.chat)
        wait_until(lambda: server.service.scheduler.num_waiting == 1)
        full = server.chat()
        assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
        assert full.json()["error"]["type"] == "rate_limit_error"
        server.server.handle_exit(signal.SIGTERM, None)
        assert waiting.result().status_code == 503
        assert server.chat().status_code == 503 == server.client.get("/health").status_code
        assert exits == []
        server.server.handle_exit(signal.SIGTERM, None)
        assert exits == [130] and "answers in progress are lost" in capsys.readouterr().err
        assert list(stream)[-1] == "data: [DONE]"
        wait_until(lambda: server.server.should_exit)


@pytest.mark.slow
@pytest.mark.usefixtures("slow")
def test_a_fault_ends_its_own_requests_only(new: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with new() as server:
        expected = server.chat().json()["choices"]
        with monkeypatch.context() as patch:
            patch.setattr(BatchDecoder, "step", lambda self: 1 / 0)
            assert server.chat().status_code == 500
        with monkeypatch.context() as patch:
            patch.setattr(BatchDecoder, "add", lambda self, *_, **__: 1 / 0)
            assert server.chat(stream=True).status_code == 500
        assert [server.chat().json()["choices"] for _ in range(4)] == [expected] * 4


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def connected(clients: ExitStack, server: Running, body: bytes = b"", length: int = 0) -> socket.socket:
    """A client that sends the beginning of a request, and reads only on request."""
    found = clients.enter_context(socket.socket())
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    found.settimeout(10)
    found.connect(server.server.servers[0].sockets[0].getsockname())
    if body:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        found.sendall(f"{head}Content-Length: {max(length, len(body))}\r\n\r\n".encode() + body)
    return found


def test_connections_without_a_request_or_a_reader_end(server, clients, monkeypatch):
    monkeypatch.setattr(server_module, "IDLE_S", 1.0)
    monkeypatch.setattr(server.server.config, "limit_concurrency", 4)
    silent = [connected(clients, server) for _ in range(12)]
    with httpx.Client(base_url=server.url, timeout=60) as new:  # takes the place of a silent one
        assert replace(server, client=new).chat().status_code == 200
    silent[-1].sendall(b"GET /health")
    for client in silent:
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
    monkeypatch.setattr(completion, "CHAT_ROLE", {"role": "assistant", "content": "x" * 10_000_000})
    connected(clients, server, json.dumps({"messages": HELLO, "max_tokens": 8, "stream": True}).encode())
    wait_until(lambda: running(server) == 1)
    wait_until(lambda: running(server) == 0 and not server.service.scheduler.places)
    wait_until(lambda: not any(not one.is_idle for one in server.server.server_state.connections))


def test_a_place_is_reserved_before_a_body_is_read_and_all_bodies_have_one_budget(new, clients):
    large = b" " * 900_000
    with new(limits={"max_requests": 1, "queue": 5, "max_body_mb": 1.0}, policy="autoregressive") as server:
        for _ in range(4):
            connected(clients, server, large, length=950_000)
        wait_until(lambda: len(server.service.scheduler.places) == 4)
        assert b"429" in connected(clients, server, large, length=950_000).recv(100)
        for _ in range(2):
            connected(clients, server, b" ", length=9)
        wait_until(lambda: len(server.service.scheduler.places) == 6)
        assert server.chat().status_code == 429
        clients.close()
        wait_until(lambda: len(server.service.scheduler.places) == 0)
        assert server.chat().status_code == 200


def test_a_decoder_that_hangs_is_reported_and_does_not_keep_the_server(new, monkeypatch):
    goes_on = threading.Event()
    monkeypatch.setattr(scheduler, "HUNG_S", 0.1)
    with new(limits={"drain_seconds": 0.2}) as server, ThreadPoolExecutor(1) as pool:
        step = BatchDecoder.step
        monkeypatch.setattr(BatchDecoder, "step", lambda self: (goes_on.wait(), step(self))[1])
        answer = pool.submit(server.chat)
        wait_until(lambda: server.client.get("/health").status_code == 503)
        assert "has made no round for" in server.client.get("/health").text
        server.server.handle_exit(signal.SIGTERM, None)
        assert answer.result().status_code == 503
        goes_on.set()


def test_key_host_origins_and_request_ids(new: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sage.serving")
    with new(policy="autoregressive", api_key="secret", allowed_origins=["http://page"]) as server:
        preflight = {"origin": "http://page", "access-control-request-method": "POST"}
        reply = server.client.options(CHAT, headers=preflight)
        assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == "http://page"
        head = server.client.head("/health", headers={"x-request-id": "mine"})
        assert head.status_code == 200 and head.content == b"" and head.headers["x-request-id"] == "mine"
        request_id = server.chat().headers["x-request-id"]
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            reply = server.client.get("/v1/models", headers=header)
            assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
        assert server.client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        assert server.client.get("/health").status_code == 200
    assert request_id in caplog.text and "mine HEAD /health 200" in caplog.text  # written after the response


def test_a_local_server_without_a_key_has_the_names_of_this_machine_only(server: Running) -> None:
    assert server.client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
    assert server.client.get("/v1/models", headers={"host": "localhost:80"}).status_code == 200


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_stop_string_is_found_across_pieces(cut: int) -> None:
    text = "ab<en<end>cd"
    stops = StopStrings(["<end>", "zz"])
    found = "".join(stops.feed(text[at : at + cut], at + cut >= len(text)) for at in range(0, len(text), cut))
    assert (found, stops.is_found) == ("ab<en", True)
    other = StopStrings(["<end>"])
    assert other.feed("x<en") + other.feed("", is_last=True) == "x<en"


def test_caches_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="at most --max-requests 2, or a lower --max-context"):
        check_caches(10**9, 25 * 10**8, 8, 4096)
    check_caches(10**9, None, 8, 4096)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--port 99999", "--port 99999: bind(): port must be 0-65535"),
        ("--policy sgae", "did you mean sage?"),
        ("--queue -1", "queue: -1 is not allowed"),
        ("--allow-remote-media http://x", "is not a host"),
        ("--host 203.0.113.7", "--host 203.0.113.7 --port 8000: Cannot assign"),
    ],
)
def test_mistakes_of_the_command_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(command.main, "--target", "pocket_qwen3_vl", *words.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_options_of_a_file_are_those_of_the_command_line_which_counts(tmp_path, capsys):
    file = tmp_path / "serve.options"
    file.write_text("--target 'T'  # a comment\n--port=1\n--allowed-origins http://a,http://b\n--ignore-unknown-fields\n")
    args = command.parse_args(["--config", str(file), "--port", "2"])
    assert (args.target, args.port, args.allowed_origins) == ("T", 2, ["http://a", "http://b"])
    assert args.ignore_unknown_fields
    example = Path(__file__).parents[2] / "examples/serving/options"
    assert command.parse_args(["--config", str(example)]).host == "0.0.0.0"
    for text, message in (("--prot 1", "--prot: unknown option (did you mean --port?)"), ("'", "No closing quotation")):
        file.write_text(text)
        assert exit_code(command.main, "--config", str(file)) == 2
        assert message in capsys.readouterr().err


def test_the_extra_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "PACKAGES", ("fastapi", "gone_package"))
    assert exit_code(command.main, "--target", "pocket_qwen3_vl") == 2
    assert capsys.readouterr().err == "error: sage-serve: gone_package not installed; pip install 'sage-draft[serve]'\n"


def test_errors_are_ascii_and_short() -> None:
    error = ApiError(400, "x\ny \ud800" + "z" * 1000)
    assert len(json.loads(error.body())["error"]["message"]) == 400

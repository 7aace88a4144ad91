"""Answers from a server: the same rows as from a decoder, whatever fails on the way, and no address in any of them."""

import io
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from support.chat_server import MODEL, ChatServer, Reply, refusal, serving
from support.data_helpers import (
    TwoTurnConversations,
    assistant,
    content,
    make_image,
    make_noise,
    make_processor,
    one_by_one,
    rows,
    user,
)
from support.messages import check_message, refused

from data_prep.config import Images, RegenerateConfig
from data_prep.conversation import Conversation, Message
from data_prep.dialog import Outcome, TargetAnswer
from data_prep.server import answers as answers_module
from data_prep.server.answers import TEXT_PROMPT, ServedTarget, ServerAnswers
from data_prep.server.client import MediaPolicy, OutsideMedia, ServerError
from data_prep.tools.regenerate import part_path, regenerate, skipped_path
from sage.inputs.media import decode_data_url, open_image
from sage.inputs.messages import text_of

PROCESSOR = make_processor("qwen2_5_vl")
TARGET = ServedTarget("here/toy", {}, PROCESSOR)
KEY = "secret-key-123"
NUM = 12


def echo(messages: list[Message], seed: int) -> TargetAnswer:
    """Answers with the texts of all messages, the first pixel and the seed; the second answer of c5 never ends."""
    texts = [text_of(message) for message in messages]
    pixel = [open_image(part["image"]).getpixel((0, 0)) for part in messages[0]["content"] if part["type"] == "image"]
    is_endless = texts[0] == "q5?" and len(messages) == 3
    return TargetAnswer(f"{'|'.join(texts)} {pixel} {seed}", Outcome.cut if is_endless else Outcome.answered)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with serving(PROCESSOR, echo) as found:
        yield found


@contextmanager
def opened(*urls: str, policy: MediaPolicy | None = None, **settings: Any) -> Iterator[ServerAnswers]:
    fast = {"retry_delay_s": 0.01, "timeout_s": 60.0, "retries": 2, "concurrency": 4, "max_new_tokens": 100}
    config = RegenerateConfig(server=list(urls), **fast | settings)
    with ServerAnswers(config, KEY, TARGET, policy or MediaPolicy((), Images.inline)) as answers:
        yield answers


def run(out: Path, *urls: str, dataset: Any = None, policy: MediaPolicy | None = None, **settings: Any) -> Any:
    with opened(*urls, policy=policy, **settings) as answers:
        provenance = {"served_model": answers.check()}
        return regenerate(dataset or TwoTurnConversations(NUM), answers.drive, out, provenance, RegenerateConfig())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that a decoder in this process gives."""
    out = tmp_path_factory.mktemp("decoder") / "out.jsonl"
    regenerate(TwoTurnConversations(NUM), one_by_one(echo), out, {"served_model": MODEL}, RegenerateConfig())
    return content(out)


# -- the same rows ----------------------------------------------------------------------------------------------------


def meet(count: int, *servers: ChatServer) -> None:
    """The first `count` requests wait for each other."""
    together = threading.Barrier(count)

    def wait(number: int, body: Any) -> None:
        if "seed" in body and sum(len(server.prompts) for server in servers) <= count:
            together.wait(timeout=30)

    for server in servers:
        server.fault = wait


@pytest.mark.parametrize("concurrency", [1, 5])
def test_rows_are_those_of_a_decoder(concurrency: int, server: ChatServer, expected: dict[str, bytes], tmp_path: Path) -> None:
    meet(concurrency, server)
    found = run(tmp_path / "out.jsonl", server.url, concurrency=concurrency)
    assert found.outcomes == {"answered": NUM - 2, "cut short": 1, "invalid": 1}
    assert content(tmp_path / "out.jsonl") == expected
    assert server.most_active == concurrency
    assert len(server.prompts) == 2 * (NUM - 1)


def test_request_states_every_option_that_determines_the_answer(server, tmp_path, monkeypatch):
    monkeypatch.setattr(PROCESSOR.family, "template_arguments", {"enable_thinking": False})  # of a hybrid thinking model
    run(tmp_path / "out.jsonl", server.url, temperature=0.5, top_k=7, top_p=0.9, concurrency=1)
    first, second = server.prompts[:2]
    options = {"model": MODEL, "max_tokens": 100, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.0}
    options["repetition_penalty"] = 1.0  # otherwise that of generation_config.json
    assert (options | {"chat_template_kwargs": {"enable_thinking": False}}).items() <= first.items()
    assert first["seed"] != second["seed"]
    question, answer, more = second["messages"]
    assert [part["type"] for part in question["content"]] == ["image_url", "text"]
    assert answer["content"].startswith("q0? ") and more["content"] == "more"
    assert set(server.keys) == {f"Bearer {KEY}"}


def test_server_with_standard_options_answers_in_text(server: ChatServer, expected: dict[str, bytes], tmp_path: Path) -> None:
    server.extensions = False
    run(tmp_path / "out.jsonl", server.url)
    assert content(tmp_path / "out.jsonl") == expected
    assert all(body.keys() == {"model", "messages", "max_tokens", "temperature", "top_p", "seed"} for body in server.prompts)
    with refused("regenerate.top_k=3", "the server", "set it to 0", error=ServerError), opened(server.url, top_k=3) as answers:
        answers.check()


def test_several_servers_share_the_work(server: ChatServer, expected: dict[str, bytes], tmp_path: Path) -> None:
    with serving(PROCESSOR, echo) as other:
        meet(4, server, other)
        run(tmp_path / "out.jsonl", server.url, other.url)
        assert content(tmp_path / "out.jsonl") == expected
        assert server.most_active == other.most_active == 2


# -- faults -----------------------------------------------------------------------------------------------------------

SLOW_DOWN = refusal("slow down", 429)
FAULTS = {
    "retry-after": refusal("slow down", 429, Retry_After="0.05"),
    "500": refusal("internal", 500),
    "cut": Reply(action="cut"),
    "garbage": Reply(action="garbage"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_passing_faults_are_retried(name: str, server: ChatServer, expected: dict[str, bytes], tmp_path: Path) -> None:
    server.fault = lambda number, body: FAULTS[name] if "seed" in body and server.requests.count(body) <= 2 else None
    run(tmp_path / "out.jsonl", server.url, retries=4 * NUM, concurrency=NUM)
    assert content(tmp_path / "out.jsonl") == expected
    assert len(server.prompts) == 3 * 2 * (NUM - 1)


def test_storm_of_refusals_ends_the_run_and_keeps_the_work(server, expected, tmp_path):
    out = tmp_path / "out.jsonl"
    server.fault = lambda number, body: SLOW_DOWN if len(server.prompts) > 10 else None
    with refused("regenerate.server", "3 attempts", "429 Too Many Requests: slow down", "same command", error=ServerError):
        run(out, server.url)
    assert not out.exists()
    kept = part_path(out, 0, 1).read_text().count("\n")
    assert 1 <= kept < NUM
    server.fault = lambda number, body: None
    assert run(out, server.url).done_before == kept
    assert content(out) == expected


def test_server_that_goes_down_ends_the_run(server: ChatServer, tmp_path: Path) -> None:
    """Its port refuses connections: the other server of the list takes over, and if there is none, the run ends."""
    with ExitStack() as stack:
        with serving(PROCESSOR, echo) as dying:
            both = stack.enter_context(opened(server.url, dying.url, retry_delay_s=5.0))
            one = stack.enter_context(opened(dying.url))
            both.check()
            one.check()
        prompts = Photos(*"abcdef")  # without images, which are tried at the start
        found = regenerate(prompts, both.drive, tmp_path / "both.jsonl", {}, RegenerateConfig())
        assert found.outcomes == {"answered": 6}
        with refused("regenerate.server", "no connection", error=ServerError):
            regenerate(prompts, one.drive, tmp_path / "one.jsonl", {}, RegenerateConfig())
    with opened(server.url, dying.url) as answers, refused("server 2 of 2", "no connection", error=ServerError) as caught:
        answers.check()
    assert_no_address(str(caught.value), dying)


def test_request_that_fails_every_time_is_listed_and_the_others_are_answered(server: ChatServer, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    server.fault = lambda number, body: FAULTS["500"] if "seed" in body and "q2?" in str(body["messages"]) else None
    found = run(out, server.url)
    assert found.outcomes == {"answered": NUM - 3, "cut short": 1, "invalid": 1, "failed": 1}
    (failed,) = [row for row in rows(skipped_path(out)) if row["outcome"] == "failed"]
    check_message(failed["reason"], "chats: item 2 (id c2): answer 1", "3 attempts failed")


def test_refused_request_is_listed_and_not_retried(server, tmp_path, caplog):
    out = tmp_path / "out.jsonl"
    server.fault = lambda number, body: refusal("too long") if "seed" in body and "more" in str(body["messages"]) else None
    found = run(out, server.url)
    assert found.outcomes == {"refused": NUM - 1, "invalid": 1}
    assert len(server.prompts) == 2 * (NUM - 1)
    assert [row["kept"] for row in rows(out)] == [1] * (NUM - 1)  # the first answers
    check_message(rows(out)[0]["reason"], "item 0 (id c0): answer 2: refused by the server: 400 Bad Request: too long")
    assert len([message for message in caplog.messages if "too long" in message]) == 1


@pytest.mark.parametrize(("status", "parts"), [(401, ("key_variable",)), (404, ("/v1",)), (302, ("redirects",))])
def test_refusal_of_every_request_ends_the_run(status: int, parts: tuple[str, ...], server: ChatServer, tmp_path: Path) -> None:
    server.fault = lambda number, body: refusal("no", status) if len(server.prompts) > 4 else None
    with refused("regenerate.server: the server", str(status), *parts, error=ServerError):
        run(tmp_path / "out.jsonl", server.url)


def test_empty_and_missing_texts_are_listed(server: ChatServer, tmp_path: Path) -> None:
    server.answer = lambda messages, seed: TargetAnswer("" if "q1?" in text_of(messages[0]) else "a")
    assert run(tmp_path / "out.jsonl", server.url).outcomes == {"answered": NUM - 2, "empty": 1, "invalid": 1}
    reply = Reply(body={"choices": [{"message": {"content": None}, "finish_reason": "tool_calls"}]})
    server.fault = lambda number, body: reply if "seed" in body else None
    assert run(tmp_path / "none.jsonl", server.url).outcomes == {"refused": NUM - 1, "invalid": 1}
    assert rows(tmp_path / "none.jsonl") == []


# -- the check at the start -------------------------------------------------------------------------------------------

OTHER = [{"id": "models/other"}, {"id": "models/third", "root": "/disk/third"}]
CHOICE = {"message": {"content": "a"}, "finish_reason": "stop"}
REVERSED = PROCESSOR.prepare(TEXT_PROMPT)["input_ids"][0].tolist()[::-1]
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "another model": ({"models": OTHER}, {}, ("models/other, models/third", "here/toy", "regenerate.model=ID")),
    "unknown id": ({}, {"model": "x"}, ("regenerate.model=x", MODEL)),
    "no models": ({"models": None}, {}, ("lists no models", "/v1")),
    "another tokenizer": ({"processor": make_processor("llava_onevision")}, {}, ("tokens", "here/toy")),
    "other ids": (
        {"fault": lambda number, body: Reply(body={"choices": [CHOICE], "prompt_token_ids": REVERSED})},
        {},
        ("as other tokens than the target here/toy",),
    ),
    "short context": ({"models": [{"id": "toy", "max_model_len": 90}]}, {}, ("regenerate.max_new_tokens=100", "90")),
    "key": ({"fault": lambda number, body: refusal(f"key {KEY}", 401)}, {}, ("401 Unauthorized", "key_variable")),
    "no text": ({"fault": lambda number, body: refusal("never")}, {}, ("refuses a short text prompt", "never")),
    "no chat": ({"fault": lambda number, body: Reply(body=[])}, {}, ("no chat completion",)),
    "busy": ({"fault": lambda number, body: refusal("busy", 429)}, {}, ("429 Too Many Requests: busy", "3 attempts")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsuitable_server_is_refused_at_the_start(name: str) -> None:
    options, settings, parts = REFUSED[name]
    with (
        serving(options.pop("processor", PROCESSOR) if "processor" in options else PROCESSOR, echo, **options) as server,
        opened(server.url, **settings) as answers,
        refused(*parts, error=ServerError) as caught,
    ):
        answers.check()
    assert_no_address(str(caught.value), server)


def test_silent_server_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*args: Any, timeout: httpx.Timeout, **options: Any) -> None:
        raise httpx.ReadTimeout(f"after {timeout.read} s")

    monkeypatch.setattr(httpx.AsyncClient, "request", silent)
    with opened("http://localhost/v1", timeout_s=7.0) as answers, refused("no answer within 7 s", error=ServerError) as caught:
        answers.check()
    assert str(caught.value.__cause__.__cause__) == "after 7.0 s"


@pytest.mark.parametrize(("model", "name"), [("", "served"), ("adapter", "adapter")])
def test_server_of_one_model_under_another_name_is_named(model: str, name: str, server: ChatServer) -> None:
    server.models = [{"id": "served", "root": "/disk/toy"}, {"id": "adapter"}]
    with opened(server.url, model=model) as answers:
        assert answers.check() == name


def test_server_without_images_is_refused_before_any_answer(server: ChatServer, tmp_path: Path) -> None:
    server.takes_images = False
    with refused("refuses images: 4 of 4", "At most 0 image(s)", error=ServerError):
        run(tmp_path / "out.jsonl", server.url)
    assert not server.prompts
    assert not list(tmp_path.iterdir())


# -- images -----------------------------------------------------------------------------------------------------------


class Photos:
    """Prompts with one image each."""

    def __init__(self, *images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def conversation(self, number: int) -> Conversation:
        return Conversation(f"p{number}", [user(self.images[number], "What?"), assistant("old")], meta={"index": number})


def image_urls(server: ChatServer) -> list[str]:
    return [body["messages"][0]["content"][0]["image_url"]["url"] for body in server.prompts]


def test_files_are_sent_as_they_are_unless_readers_differ(server: ChatServer, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    photo, rotated = make_noise(64, 32), Image.Exif()
    rotated[0x0112] = 6
    files = [folder / name for name in ("a.jpg", "b.png", "c.jpg", "d.png", "e.bmp")]
    for file in files:
        (photo.convert("RGBA") if file.name == "d.png" else photo).save(
            file, **{"exif": rotated} if file.name == "c.jpg" else {}
        )
    dataset = Photos(*files, files[0].read_bytes(), photo)
    policy = MediaPolicy((folder,), Images.inline)
    run(tmp_path / "out.jsonl", server.url, dataset=dataset, policy=policy, concurrency=1)
    urls = image_urls(server)
    sent = [decode_data_url(url) for url in urls]
    assert [data == file.read_bytes() for data, file in zip(sent, files, strict=False)] == [True, True, False, False, False]
    assert sent[5] == files[0].read_bytes()
    kinds = [url.partition(";")[0].removeprefix("data:image/") for url in urls]
    assert kinds == ["jpeg", "png", "png", "png", "png", "jpeg", "png"]
    by_path = MediaPolicy((folder,), Images.path)  # on request
    assert [by_path.url(file) for file in files[:2]] == [file.as_uri() for file in files[:2]]
    assert by_path.url(photo).startswith("data:image/png;base64,") and by_path.url(files[2]).startswith("data:")
    for data, image in zip(sent, dataset.images, strict=True):
        with Image.open(io.BytesIO(data)) as received:
            assert received.convert("RGB").tobytes() == open_image(image).tobytes()


@pytest.mark.parametrize("place", ["elsewhere/a.png", "root/link.png", "root/../elsewhere/a.png", "root2/a.png"])
def test_image_outside_the_media_root_is_never_sent(place, server, tmp_path, monkeypatch):
    monkeypatch.setattr(answers_module, "NUM_SEARCHED", 2)
    for folder in ("root", "root2", "elsewhere"):
        (tmp_path / folder).mkdir()
        make_noise().save(tmp_path / folder / "a.png")
    (tmp_path / "root" / "link.png").symlink_to(tmp_path / "elsewhere" / "a.png")
    policy = MediaPolicy((tmp_path / "root",), Images.inline)
    for dataset in (Photos(tmp_path / place), Photos(*[make_image()] * 4, tmp_path / place)):
        with refused("image ", "outside data.media_root", error=OutsideMedia):
            run(tmp_path / f"{len(dataset)}.jsonl", server.url, dataset=dataset, policy=policy)
    assert not any(len(decode_data_url(url)) > 1000 for url in image_urls(server))


def test_unreadable_images_and_videos_are_listed(server: ChatServer, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    dataset = Photos(b"no image", [make_image(), make_image()], make_image())
    assert run(out, server.url, dataset=dataset).outcomes == {"invalid": 2, "answered": 1}
    image, video = rows(skipped_path(out))
    check_message(image["reason"], "item 0 (id p0)", "not an image")
    check_message(video["reason"], "item 1 (id p1)", "a video", "without regenerate.server")


# -- secrets ----------------------------------------------------------------------------------------------------------


def assert_no_address(text: str, server: ChatServer) -> None:
    for secret in (KEY, server.url, server.url.split("/")[2]):
        assert secret not in text


def test_neither_url_nor_key_is_written_anywhere(server: ChatServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not even when the server repeats them in its messages."""
    server.fault = lambda number, body: refusal(f"{KEY} at {server.url}!") if "seed" in body and number % 2 else None
    with caplog.at_level("DEBUG"):
        run(tmp_path / "out.jsonl", server.url)
    written = "".join(path.read_text() for path in tmp_path.iterdir() if path.is_file())
    assert "400 Bad Request: ... at ...!" in written
    assert_no_address(written, server)
    assert_no_address("\n".join(caplog.messages), server)

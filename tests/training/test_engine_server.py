"""`python -m benchmarks.engines --server` with a small server in a thread: requests, counters, figures, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from support.chat_server import JsonHandler, listening
from support.pass_helpers import without_compiler
from support.train_helpers import make_target

import sage
from benchmarks.engines import __main__ as bench
from benchmarks.engines.measure import server_decoder
from benchmarks.engines.server import ServerClient
from data_prep.config import KEY_VARIABLE

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {rounds}
vllm:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 0.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {rounds}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {half}
"""


@dataclass
class Served:
    """The model of the server, and the requests it has received.

    Attributes:
        rounds: counted at every answer; 0: no `/metrics`.
        is_strict: refuses parameters that OpenAI does not know.
    """

    rounds: int = 0
    is_strict: bool = False
    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    def chunks(self) -> Iterator[Any]:
        for token in (5, 6, 7):
            ids = {} if self.is_strict else {"token_ids": [token]}
            reason = "stop" if token == 7 else None
            yield {"choices": [{"delta": {"content": "a"}, "finish_reason": reason, **ids}]}
        yield {"choices": [], "usage": {"completion_tokens": 3}}


@contextmanager
def serving(**options: Any) -> Iterator[Served]:
    served = Served(**options)

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            count = len(served.bodies) * served.rounds
            if self.path == "/v1/models":
                self.send(200, b'{"data": [{"id": "m"}]}')
            elif self.path == "/metrics" and served.rounds:
                self.send(200, METRICS.format(rounds=float(count), half=count / 2).encode())
            else:
                self.send(404, b"{}")

        def do_POST(self) -> None:
            served.keys.append(self.headers.get("Authorization"))
            served.bodies.append(self.received())
            if served.is_strict and "return_token_ids" in served.bodies[-1]:
                self.send(400, b'{"error": {"message": "unknown parameter"}}')
                return
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in served.chunks()]
            self.send(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

    with listening(Handler) as served.url:
        yield served


QUESTION = [{"role": "user", "content": "?"}]


def tokenizer(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
    assert not add_special_tokens
    return {"input_ids": [ord(letter) for letter in text]}


def test_a_server_without_extensions() -> None:
    loaded: Any = SimpleNamespace(processor=SimpleNamespace(tokenizer=tokenizer), eos_token_ids=[2])
    compared: Any = SimpleNamespace(max_new_tokens=9, served_draft="head")
    with serving(is_strict=True) as served, ServerClient(served.url, "") as client:
        decoder = server_decoder(compared, client, "m", loaded, [QUESTION])
        assert (decoder.turn()[0].tokens, decoder.draft) == ([97, 97, 97, 2], "")
    assert ["return_token_ids" in body for body in served.bodies] == [True, False, False]


@pytest.mark.slow
def test_comparison_on_the_prompts_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.engines.comparison.SETTLE_S", 0.0)
    executor = without_compiler(monkeypatch)
    monkeypatch.setenv(KEY_VARIABLE, "s3cret")
    target = sage.load_target(make_target(tmp_path, layers=8), dtype=torch.float32)
    sage.new_draft(target, "eagle3", seed=0, image_inputs="token").save_pretrained(tmp_path / "run" / "draft")
    data = {"sources": {"p": {"kind": "pocket", "families": ["sign"]}}}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    words = ["--draft", f"head={tmp_path / 'run'}", "--policy", "two=chain:depth=2", "--prompts", "2", "--repeats", "2"]
    out = tmp_path / "out.json"
    with serving(rounds=4) as served:
        assert bench.main([*words, "--max-new-tokens", "6", "--server", f"{served.url}/v1", "--out", str(out)]) == 0
    assert executor.num_bound > 0, "passes are compiled by default, as those of a server"
    found, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert list(found["decoders"]) == ["autoregressive", "two, head", "server"]
    assert found["decoders"]["server"]["draft"] == "head" and found["decoders"]["server"]["match"] == 0
    assert found["decoders"]["server"]["first_token_ms"] > 0
    assert set(found["ratios"]) == {"same draft", "any draft"}
    assert found["server"] == {"model": "m", "rounds": 24, "accepted": [1.0, 0.5]}  # warm-up and two turns of two prompts
    image, _ = served.bodies[0]["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert len(served.bodies) == 7 and served.keys == ["Bearer s3cret"] * 7
    assert "server: accepted 1.000 0.500 at position 1, 2, .. of 24 rounds" in printed and "first token" in printed
    for text in (out.read_text(), printed):
        assert "s3cret" not in text and "127.0.0.1" not in text

"""`python -m benchmarks.serving.beside_vllm` with stand-ins for servers and generator: turns, figures, command lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving import beside_vllm
from benchmarks.serving.beside_vllm import OURS, VLLM, Lab, Load, ServerSetting

RESULT: dict[str, Any] = {
    "output_throughput": 100.0,
    "ttfts": [0.1, 0.3],
    "itls": [[0.0, 0.2, 0.0], [0.1]],
    "output_lens": [5, 1],
    "generated_texts": ["a", "b"],
    "errors": ["", ""],
}


def test_figures_of_a_load() -> None:
    """Five tokens in three chunks take 0.2 s after the first one; an answer of one token has no interval of tokens."""
    load = Load.read(RESULT)
    assert load.token_s == [pytest.approx(0.05)] and load.interval_s == [0.0, 0.2, 0.0, 0.1]
    loads = [load, Load(300.0, [0.2], [0.07], [0.1], ["a", "x"])]
    found = beside_vllm.figures(2, ServerSetting(side=VLLM, depth=3), loads, ["a", "b"])
    assert found["server"] == "vLLM 3 tokens" and found["tokens_per_s"] == 200.0 and found["range"] == [100.0, 300.0]
    assert (found["same_text"], found["texts"]) == (1, 2) and found["first_token_s"][0] == pytest.approx(0.2)
    assert "| 2 | vLLM 3 tokens | 200 | 100-300 | 200 | 290 |" in beside_vllm.table([found])
    with pytest.raises(ValueError, match="1 of 2 requests failed: +Timeout"):
        Load.read({**RESULT, "errors": ["", "Traceback\n  Timeout"]})


def test_servers_take_turns_on_the_same_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    @contextmanager
    def serving(setting: ServerSetting, lab: Lab) -> Iterator[Any]:
        yield SimpleNamespace(label=setting.label, address=setting.label, wait=lambda: None)

    def load(lab: Lab, address: str, prompts: Path, count: int, concurrency: int, max_new_tokens: int) -> Load:
        rows = [json.loads(line) for line in prompts.read_text().splitlines()]
        assert count == len(rows) == 2 and {part["type"] for part in rows[0]["content"]} == {"text", "image_url"}
        calls.append((address, concurrency))
        return Load.read(RESULT)

    monkeypatch.setattr(beside_vllm, "serving", serving)
    monkeypatch.setattr(beside_vllm, "load", load)
    monkeypatch.setattr("benchmarks.engines.comparison.SETTLE_S", 0.0)
    settings = [ServerSetting(side=OURS, policy="chain"), ServerSetting(side=VLLM)]
    args: Any = SimpleNamespace(prompts=2, repeats=2, max_new_tokens=4)
    names: dict[str, Any] = {name: Path(name) for name in ("target", "draft", "export", "python")}
    found = beside_vllm.measure(Lab(**names, cores=[0], scratch=tmp_path, max_requests=4), settings, [1, 4], args)
    ours, theirs = "sage-serve chain", "vLLM without draft"
    warm_up, alone = [(ours, 4), (theirs, 4)], [(ours, 1)]
    in_turns = [(server, number) for number in (1, 4) for server in (ours, theirs, theirs, ours)]
    assert calls == [*warm_up, *in_turns, *alone]
    assert [(row["server"], row["requests"]) for row in found] == [(ours, 1), (theirs, 1), (ours, 4), (theirs, 4)]

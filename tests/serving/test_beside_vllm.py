"""`python -m benchmarks.serving.beside_vllm` with stand-ins for servers and generator: turns, figures, command lines."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.serving import beside_vllm
from benchmarks.serving.beside_vllm import VLLM, Load, ServerSetting

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

"""`python -m benchmarks.engines` with a stand-in for vLLM: prompts, turns and figures.

The real engine runs in `make engines`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from support.fake_vllm import install_fake_vllm
from support.messages import refused
from support.train_helpers import make_target

import sage
from benchmarks.engines import __main__ as bench
from benchmarks.engines.comparison import Answer, Decoder, figures, report, take_turns

PYTHON = Path(sys.executable)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("engines"), layers=8)


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    folder = target.parent / "draft"
    loaded = sage.load_target(target, dtype=torch.float32)
    sage.new_draft(loaded, "eagle3", seed=0, image_inputs="token").save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_comparison_runs_both_sides_on_the_same_prompts(target, draft, tmp_path, capsys, monkeypatch):
    log = install_fake_vllm(tmp_path, monkeypatch)
    monkeypatch.setattr("benchmarks.engines.comparison.SETTLE_S", 0.0)
    out = tmp_path / "out.json"
    words = ["--draft", f"head={draft}", "--policy", "two=chain:depth=2", "--num-speculative-tokens", "3", "--prompts", "2"]
    sizes = ["--ngram", "--repeats", "2", "--max-new-tokens", "6", "--baselines", "hf_generate", "--threads", "1"]
    assert bench.main([*words, *sizes, "--passes", "eager", "--engine-python", str(PYTHON), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    ours = ["autoregressive", "hf_generate", "two, head"]
    assert list(found["decoders"]) == [*ours, "vllm", "vllm enforce_eager", "vllm 3 tokens", "vllm ngram"]
    assert [found["decoders"][name]["match"] for name in ours] == [2, 2, 2] and found["decoders"]["vllm"]["match"] == 0
    assert found["decoders"]["vllm 3 tokens"]["tokens_per_s"] == 4.0  # two tokens after the first one, in half a second
    assert found["decoders"]["vllm 3 tokens"]["tokens_per_target_pass"] == 2.0
    assert set(found["ratios"]) == {"autoregressive", "same draft", "any draft"}
    assert found["engine"]["vllm"] == "0.32.0" and found["passes"] == "eager"
    started = [json.loads(line) for line in log.read_text().splitlines()]
    speculative = [row["llm"].get("speculative_config", {}) for row in started]
    assert [options.get("num_speculative_tokens") for options in speculative] == [None, None, 3, 4]
    assert speculative[3]["method"] == "ngram" and "model" not in speculative[3]
    assert {Path(row["llm"]["model"]).name for row in started} == {found["target"]}
    assert [row["llm"]["enforce_eager"] for row in started] == [False, True, False, False]
    assert [(row["threads"], row["cores"]) for row in started] == [("1", sorted(os.sched_getaffinity(0))[:1])] * 4
    assert "same draft: two, head / vllm" in capsys.readouterr().out


def test_ratios_are_taken_within_a_repeat_and_of_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.engines.comparison.SETTLE_S", 0.0)
    order: list[str] = []

    def scripted(label: str, side: str, draft: str, *speeds: float) -> Decoder:
        """A decoder with given speeds, one per turn after the warm-up; two prompts with three tokens each."""
        left = iter([1.0, *speeds])

        def turn() -> list[Answer]:
            order.append(label)
            seconds = 2 / next(left)
            return [Answer([1, 2, 3], seconds, 2 * seconds, 1)] * 2

        return Decoder(label, side, draft, turn)

    decoders = [scripted("slow", "ours", "", 10, 20, 40), scripted("tree", "ours", "head", 30, 60, 90)]
    decoders += [scripted("other", "ours", "better", 40, 80, 160), scripted("engine", "vLLM", "", 20, 40, 60)]
    decoders += [scripted("engine 1", "vLLM", "head", 10, 20, 30), scripted("engine 3", "vLLM", "head", 30, 30, 60)]
    found = figures(take_turns(decoders, 3), "head")
    labels = [one.label for one in decoders]
    assert order == [*labels, *labels, *labels[1:], *labels[:1], *labels[2:], *labels[:2]]
    alone = found["ratios"]["autoregressive"]
    assert (alone["ours"], alone["theirs"], alone["ratio"]) == ("slow", "engine", 0.5)
    assert alone["range"] == pytest.approx([0.5, 2 / 3])
    assert found["ratios"]["same draft"]["theirs"] == "engine 3"
    assert found["ratios"]["same draft"]["ratio"] == pytest.approx(1.5) and found["ratios"]["same draft"]["range"] == [1.0, 2.0]
    assert found["ratios"]["any draft"]["ours"] == "other"
    assert found["decoders"]["tree"]["tokens_per_s"] == pytest.approx(60)
    assert found["decoders"]["tree"]["end_to_end_tokens_per_s"] == pytest.approx(45)
    assert "any draft: other / engine 3 = 2.67 (1.33-2.67)" in report(found)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--engine-python", "nowhere/bin/python"], ["--engine-python", "nowhere/bin/python", "make engines-env"]),
        (["--baselines", "vllm"], ["--baselines", "'vllm'", "hf_generate"]),
        (["--draft", "nowhere"], ["--draft", "no such folder"]),
        (["--server", "http://host", "--num-speculative-tokens", "3"], ["--num-speculative-tokens", "--server"]),
    ],
)
def test_bad_options_are_refused(words: list[str], parts: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"target_path": "nowhere"}')
    with refused(*parts):
        bench.main(["--draft", str(tmp_path), "--engine-python", str(PYTHON), *words])

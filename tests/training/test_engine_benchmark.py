"""`python -m benchmarks.engines` with stand-ins for vLLM and llama.cpp: prompts, turns and figures.

The real engines run in `make engines` and `make engines-llama`.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from support.chat_server import JsonHandler, listening
from support.export_helpers import REDUCED, save_draft
from support.fake_llama import install_llama
from support.fake_vllm import install_fake_vllm
from support.messages import refused
from support.models import text_sizes
from support.pass_helpers import without_compiler
from support.train_helpers import make_target
from transformers import LlamaConfig, LlamaForCausalLM

import sage
from benchmarks.engines import __main__ as bench
from benchmarks.engines.comparison import Answer, Decoder, figures, report, take_turns
from benchmarks.engines.llama import Llama
from benchmarks.engines.measure import Comparison, llama_decoders, server_decoder
from benchmarks.engines.server import ServerClient
from benchmarks.serving import beside_vllm
from benchmarks.serving.beside_vllm import VLLM, Load, ServerSetting
from checkpoints.export.formats.gguf import FILE
from data_prep.config import KEY_VARIABLE

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
    words += ["--dtypes", "fp32,bf16"]
    assert bench.main([*words, *sizes, "--passes", "eager", "--engine-python", str(PYTHON), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    ours, theirs = ["autoregressive", "hf_generate", "two, head"], ["vllm", "vllm 3 tokens", "vllm ngram"]
    dtypes = ("fp32", "bf16")
    assert list(found["decoders"]) == [f"{name}, {dtype}" for side in (ours, theirs) for dtype in dtypes for name in side]
    assert [found["decoders"][f"{name}, fp32"]["match"] for name in ours] == [2, 2, 2]
    assert found["decoders"]["vllm, fp32"]["match"] == 0 and "tokens_per_target_pass" not in found["decoders"]["vllm, fp32"]
    drafting = found["decoders"]["vllm 3 tokens, bf16"]
    assert drafting["tokens_per_s"] == 4.0  # two tokens after the first one, in half a second
    assert drafting["tokens_per_target_pass"] == 2.0 and drafting["dtype"] == "bf16"
    pairs = ("autoregressive", "same draft", "any draft")
    assert list(found["ratios"]) == [f"{pair}, {dtype}" for dtype in dtypes for pair in pairs]
    assert found["engine"]["vllm"] == "0.32.0" and found["passes"] == "eager"
    started = [json.loads(line) for line in log.read_text().splitlines()]
    speculative = [row["llm"].get("speculative_config", {}) for row in started]
    assert [options.get("num_speculative_tokens") for options in speculative] == [None, 3, 4] * 2
    assert speculative[2]["method"] == "ngram" and "model" not in speculative[2]
    assert {Path(row["llm"]["model"]).name for row in started} == {found["target"]}
    assert [row["llm"]["dtype"] for row in started] == ["float32"] * 3 + ["bfloat16"] * 3
    assert [(row["threads"], row["cores"]) for row in started] == [("1", sorted(os.sched_getaffinity(0))[:1])] * 6
    assert "same draft, bf16: two, head, bf16 / vllm" in capsys.readouterr().out


@pytest.mark.slow
def test_llama_cpp_with_every_form_of_the_weights(tmp_path: Path) -> None:
    target = sage.Target(LlamaForCausalLM(LlamaConfig(**text_sizes())))
    target.model.save_pretrained(tmp_path / "target")
    draft, prompts = save_draft(tmp_path / "draft", target, vocabulary=REDUCED), tmp_path / "prompts.json"
    prompts.write_text(json.dumps([{"ids": [5] * 4, "images": []}, {"ids": [5] * 9, "images": []}]))
    folder, cores = install_llama(tmp_path / "llama"), sorted(os.sched_getaffinity(0))[:1]
    settings: Any = {"target": str(tmp_path / "target"), "drafts": {"head": draft}, "variants": [], "cores": cores}
    compared = Comparison(**settings, depths=[3], max_new_tokens=9)
    with ExitStack() as processes:
        found = list(llama_decoders(compared, folder, prompts, tmp_path, processes))
        answers = {decoder.label: decoder.turn() for decoder in found}
    forms = {"fp32": ("F32", "F32"), "bf16": ("BF16", "BF16"), "q8_0": ("Q8_0", "BF16")}  # of the target, of the draft
    assert list(answers) == [f"llama.cpp{depth}, {form}" for form in forms for depth in ("", " 3 tokens")]
    assert [(decoder.draft, decoder.dtype) for decoder in found] == [(name, form) for form in forms for name in ("", "head")]
    for name, (form, draft_form) in forms.items():
        plain, drafting = answers[f"llama.cpp, {name}"], answers[f"llama.cpp 3 tokens, {name}"]
        assert [answer.tokens for answer in plain] == [answer.tokens for answer in drafting] == [[4, 7, 8], [9, 7, 8]]
        assert plain[0].decode_s == 0.5 and (plain[0].passes, drafting[0].passes) == (None, 1)
        options = (tmp_path / f"llama_{form.lower()}_3.log").read_text().splitlines()[0].split()
        assert ("-ctkd" in options) is ("-fa" in options) is (name == "fp32")
        assert options[options.index("--spec-draft-n-max") + 1] == "3" and options[options.index("-t") + 1] == "1"
        assert Path(options[options.index("-m") + 1]).suffix == ".gguf"
        assert f'"{draft_form}"' in (tmp_path / f"gguf_{form.lower()}" / FILE).read_text()
    prompts.write_text(json.dumps([{"ids": [5], "images": ["a.png"]}]))
    with refused("--llama", "images", "text target"):
        list(llama_decoders(compared, folder, prompts, tmp_path, ExitStack()))
    with refused(f"--llama {tmp_path}", "build/bin/llama-server", "make engines-llama"):
        Llama(tmp_path)


def test_ratios_are_taken_within_a_repeat_and_of_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.engines.comparison.SETTLE_S", 0.0)
    order: list[str] = []

    def scripted(label: str, side: str, draft: str, *speeds: float, dtype: str = "fp32") -> Decoder:
        """A decoder with given speeds, one per turn after the warm-up; two prompts with three tokens each."""
        left = iter([1.0, *speeds])

        def turn() -> list[Answer]:
            order.append(label)
            seconds = 2 / next(left)
            return [Answer([1, 2, 3], seconds, 2 * seconds, 1)] * 2

        return Decoder(label, side, draft, turn, dtype)

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
    decoders = [scripted("ours", "ours", "", 10), scripted("ours, bf16", "ours", "", 30, dtype="bf16")]
    decoders += [scripted("engine", "llama.cpp", "", 20), scripted("small", "llama.cpp", "", 60, dtype="q8_0")]
    ratios = figures(take_turns(decoders, 1), "head")["ratios"]
    assert {name: (ratio["ours"], ratio["ratio"]) for name, ratio in ratios.items()} == {
        "autoregressive, fp32": ("ours", 0.5),
        "autoregressive, q8_0": ("ours, bf16", 0.5),
    }


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--engine-python", "nowhere/bin/python"], ["--engine-python", "nowhere/bin/python", "make engines-env"]),
        (["--draft", "nowhere"], ["--draft", "no such folder"]),
        (["--server", "http://host", "--num-speculative-tokens", "3"], ["--num-speculative-tokens", "--server"]),
        (["--server", "http://host", "--llama", "folder"], ["--llama", "--server"]),
        (["--dtypes", "fp32,int8"], ["dtype", "int8"]),
    ],
)
def test_bad_options_are_refused(words: list[str], parts: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"target_path": "nowhere"}')
    with refused(*parts):
        bench.main(["--draft", str(tmp_path), "--engine-python", str(PYTHON), *words])


# -- a server -----------------------------------------------------------------------------------------------------------


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
def test_comparison_on_the_prompts_of_a_run(tmp_path, capsys, monkeypatch):
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


# -- our server beside vLLM's -------------------------------------------------------------------------------------------


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

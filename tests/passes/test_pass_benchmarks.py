"""The benchmarks of passes: times, calls and memory of each mode; texts that differ are listed with the gap of their scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import in_float64, make_inputs, random_draft
from support.pass_helpers import without_compiler

import sage
from benchmarks import passes, texts
from sage.bench.measurement import BenchPrompt
from sage.costs.measure import empty_cache, verify_pass
from sage.decoding.noise import gumbel
from sage.decoding.settings import Sampling
from sage.runtime.modes import PassMode
from sage.targets.tree_passes import TreePasses


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)


@pytest.mark.slow
def test_times_calls_and_memory_of_both_modes(tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a compiler, the compiled pass is the eager function: it allocates what the first call keeps in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "sage-draft" / "passes").mkdir(parents=True)
    (tmp_path / "sage-draft" / "passes" / "a.pt2").write_bytes(b"x" * 1_500_000)
    text = passes.measure(tiny_qwen, random_draft(tiny_qwen).eval(), nodes=[1, 3], widths=[2], context=20, repeats=11).text()
    rows = [line.split() for line in text.splitlines() if " nodes " in line]
    modes = [next(word for word in row if word in list(PassMode)) for row in rows]
    assert modes == ["eager", "compiled"] * 3
    assert all(float(row[-1]) >= 0 and float(row[-2]) >= 0 and int(row[-4]) > 0 and float(row[-5]) > 0 for row in rows)
    assert "reads, MB" in text and "peak, MB  kept, MB" in text and "1.5 MB" in text


def test_bytes_that_a_pass_reads(tiny_qwen: sage.Target) -> None:
    """All weights of the text layers and lm_head once, and the keys and values of context and node; no other embedding row."""
    tiny_qwen.passes = PassMode.eager
    tree = TreePasses(tiny_qwen, ())
    call = verify_pass(tree, tiny_qwen, empty_cache(tree, 12), 1, 10)
    with torch.inference_mode():
        found = passes.bytes_read(call, tiny_qwen.model.parameters())
    layers = {weight.data_ptr(): weight.nbytes for weight in tiny_qwen.text_model.layers.parameters()}
    head = {weight.data_ptr(): weight.nbytes for weight in (tiny_qwen.lm_head.weight, tiny_qwen.text_model.norm.weight)}
    row = 2 * tiny_qwen.num_layers * tiny_qwen.num_kv_heads * tiny_qwen.head_dim * 4
    assert found == sum((layers | head).values()) + 11 * row


@pytest.mark.slow
def test_equal_texts(tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    in_float64(tiny_qwen, {})
    draft = random_draft(tiny_qwen).eval().double()
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in make_inputs(tiny_qwen).items()}
    modes = []
    monkeypatch.setattr(texts, "texts", lambda *args, texts=texts.texts: modes.append(tiny_qwen.passes) or texts(*args))
    text = texts.report(tiny_qwen, draft, ["chain", "static"], [BenchPrompt(name="a", inputs=inputs)], tokens=8, seed=1)
    assert modes == [PassMode.eager, PassMode.compiled] * 4
    assert "compiled against eager passes" in text and "\npasses: uncompiled\n" in text
    assert "4 of 4 texts identical" in text and "differs" not in text


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_different_text_is_listed_with_its_gap(
    temperature: float, tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gap is that of the scores whose argmax the decoder takes: without noise at T = 0, else with that of the position."""
    inputs = make_inputs(tiny_qwen)
    answer = sage.generate(tiny_qwen, None, inputs, "autoregressive", max_new_tokens=4).tokens.tolist()
    other = [*answer[:2], answer[2] + 1, answer[3]]
    monkeypatch.setattr(texts, "texts", lambda target, *_: [answer if target.passes is PassMode.eager else other])
    sampling = Sampling(temperature=temperature, seed=5)
    prompts = [BenchPrompt(name="a", inputs=inputs)]
    (found,) = texts.compare(tiny_qwen, None, ["chain"], prompts, sampling, PassMode.compiled)
    assert (found.policy, found.prompt, found.index) == ("chain", "a", 2)
    added = {"input_ids": torch.tensor([answer[:2]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    by_token = {key: value for key, value in inputs.items() if value.shape == inputs["input_ids"].shape}
    zeros = torch.zeros(1, 2, dtype=torch.long)
    sequence = inputs | {key: torch.cat((value, added.get(key, zeros)), 1) for key, value in by_token.items()}
    with torch.no_grad():
        scores = tiny_qwen.lm_head(tiny_qwen.features(tiny_qwen.embed(sequence)).last[0, -1]).float()
    if temperature:
        scores = scores / temperature + gumbel(5, torch.tensor([2]), len(scores))[0]
    first, second = scores.topk(2).values.tolist()
    assert found.gap == pytest.approx(first - second, abs=1e-5)
    assert "chain, T = " in str(found) and "token 2" in str(found)

"""The benchmark of passes: times, calls and memory of each mode."""

from pathlib import Path

import pytest
import torch
from support.models import random_draft
from support.pass_helpers import without_compiler

import sage
from benchmarks import passes
from sage.costs.measure import empty_cache, verify_pass
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
    assert ["".join(row).count("(") for row in rows] == [1, 1, 2, 2, 2, 2]  # beside eager and single steps
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

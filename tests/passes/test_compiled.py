"""Compiled passes: the trees and texts of eager passes, once per pass, from disk.

A compilation takes seconds of a core: this file compiles the passes of one target and its draft once, the models have one
layer, and the code around the kernels is not optimized.
"""

import time
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import make_inputs, make_qwen, slot_head
from support.pass_helpers import LayerPass, answer, head, quick_wrappers, run_chain
from torch import nn

import sage
from sage.drafts.draft import new_session
from sage.runtime import compiled as package
from sage.runtime.cpu import graph, kernels
from sage.runtime.modes import PassMode
from sage.runtime.pass_function import EAGER
from sage.runtime.timing import decoding_now_s
from sage.targets import tree_passes
from sage.targets.tree_passes import TreePasses

pytestmark = pytest.mark.slow

MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
LAYERS = {"num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_wrappers(monkeypatch)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared_cache")


@pytest.fixture
def shared(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the passes that the tests of this file share, which run with the kernels for few rows."""
    monkeypatch.setattr(kernels, "MIN_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_folder))
    return shared_folder / "sage-draft" / "passes"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of passes for one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sage-draft" / "passes"


def test_once_per_pass_and_from_disk(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One compilation for one node and one for several, whatever the shapes; none for other weights."""
    target = make_qwen(**LAYERS)
    draft = head(target)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = answer(target, draft, PassMode.compiled, "static")
        assert found == answer(target, draft, PassMode.eager, "static")
        count = len(list(shared.glob("*.pt2")))
        assert 1 < count == capsys.readouterr().err.count("compiling")
        for _ in range(2):
            other = make_qwen(seed=1, **LAYERS)
            drafts = head(other, seed=1)
            assert answer(other, drafts, PassMode.compiled, "static") == answer(other, drafts, PassMode.eager, "static")
            compiled = capsys.readouterr().err.count("compiling")
        assert len(list(shared.glob("*.pt2"))) <= 6 and compiled == 0
        for weight in (other.lm_head.weight, other.text_model.layers[0].mlp.up_proj.weight):  # no copy of them is kept
            weight.data.neg_()
        assert answer(other, drafts, PassMode.compiled, "static") == answer(other, drafts, PassMode.eager, "static")


def test_a_head_reads_a_short_prompt_as_accepted_tokens(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiled pass that reads those; long and pruned prompts as in eager mode."""
    monkeypatch.setattr(package.Compiled, "max_prompt", 18)
    target = make_qwen(**LAYERS)
    draft, root, row, token = head(target), torch.tensor([5]), torch.tensor([0]), torch.tensor([7])
    calls: list[Any] = []
    monkeypatch.setattr(package.Package, "__call__", lambda self, args: calls.append(self) or self._run(args))
    for length, kept, num_calls in ((12, None, 1), (20, None, 0), (12, torch.arange(1, 16), 0)):
        prompt = target.embed(make_inputs(target, length=length))
        prompt.kept = kept
        found = {}
        for target.passes in (PassMode.eager, PassMode.compiled):
            session = new_session(draft, target, 40)
            features = target.prefill(prompt, target.new_cache(40), session.levels)
            logits = session.prefill(prompt, features, root)
            assert len(calls) == (num_calls if target.passes is PassMode.compiled else 0)
            cached = [rows[:, :, : session.context] for rows in (*session.cache.keys, *session.cache.values)]
            found[target.passes] = (logits, *cached, session.expand(row, token))
            calls.clear()
        torch.testing.assert_close(found[PassMode.compiled], found[PassMode.eager])


def test_several_requests(shared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One compilation for several requests, whatever their number, with the kernels for few rows."""
    target = make_qwen(kv_heads=1, num_attention_heads=2, rope_parameters=MROPE, **LAYERS)  # heads of the kernel's size
    inputs = [make_inputs(target, seed, 14 + seed) for seed in range(4)]
    expected = [sage.generate(target, None, one, "autoregressive", max_new_tokens=6).tokens.tolist() for one in inputs]
    target.passes = PassMode.compiled
    replaced: list[Any] = []
    fits = graph._folded_arguments
    monkeypatch.setattr(graph, "_folded_arguments", lambda node: replaced.append(fits(node)) or replaced[-1])
    for batch_size in (2, 4):
        found = sage.generate_batch(target, None, inputs, "autoregressive", batch_size=batch_size, max_new_tokens=6)
        assert [one.tokens.tolist() for one in found] == expected
    assert capsys.readouterr().err.count("one node of several requests") == 1 and replaced and all(replaced)


@pytest.mark.parametrize("is_single", [False, True])
@pytest.mark.parametrize("form", ["eagle", "peagle"])
def test_passes_of_drafts_over_several_requests_have_no_fixed_size(form: str, is_single: bool) -> None:
    """A size that tracing specializes, such as the number of requests, is an error of `torch.export`."""
    target = make_qwen()
    for function in (head(target) if form == "eagle" else slot_head(target, form)).pass_functions(target):
        args, dims = function.example((is_single,) * len(function.variant_dims), torch.device("cpu"))
        with torch.no_grad():
            torch.export.export(
                function, args, dynamic_shapes=dims, strict=False, prefer_deferred_runtime_asserts_over_guards=True
            )


def test_full_cache(shared: Path) -> None:
    """A tree up to the last row of the cache; a call that fails runs eagerly."""
    target = make_qwen(**LAYERS)
    target.passes = PassMode.compiled
    passes = TreePasses(target, ())
    eager = TreePasses(target, (), EAGER)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = run_chain(passes, passes.new_cache(5), 5)
    torch.testing.assert_close(found.logits, run_chain(eager, eager.new_cache(5), 5).logits)
    with pytest.warns(UserWarning, match="several nodes cannot run compiled"):
        found = run_chain(passes, eager.new_cache(5), 5)
    torch.testing.assert_close(found.logits, run_chain(eager, eager.new_cache(5), 5).logits)


def test_prompts(shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Short prompts are read by one pass, whatever their length; all others as in eager mode."""
    monkeypatch.setattr(tree_passes, "MIN_PROMPT_BYTES", 0)
    monkeypatch.setattr(package.Compiled, "max_prompt", 12)
    target, levels = make_qwen(**LAYERS), (0, 1)
    target.passes = PassMode.compiled
    complete = target.embed(make_inputs(target, length=16))
    with torch.inference_mode():
        for length, wants_attention, known, count in (
            (7, False, 0, 1),
            (12, False, 0, 0),
            (13, False, 0, 0),
            (9, False, 2, 0),
            (9, True, 0, 0),
        ):
            prompt = complete.at(torch.arange(length))
            cache, theirs = target.new_cache(40), target.new_cache(40)
            for one in (cache, theirs):
                target.prefill(prompt.at(torch.arange(known)), one) if known else None
            part = prompt.after(known)
            found = tree_passes.read_prompt(target, part, cache, levels, wants_attention)
            expected = target.prefill(part, theirs, levels, wants_attention)
            assert cache.length == theirs.length == length and (found.attention is None) is not wants_attention
            torch.testing.assert_close([found.last, *found.levels], [expected.last, *expected.levels])
            for ours, other in zip([*cache.keys, *cache.values], [*theirs.keys, *theirs.values], strict=True):
                torch.testing.assert_close(ours[:, :, :length], other[:, :, :length])
            assert capsys.readouterr().err.count("pass over a prompt") == count


def test_small_weights_are_not_part_of_the_code(own, monkeypatch, capsys):
    """Inductor writes up to 8 numbers into the code by default; a package serves any weights. A damaged file is
    compiled again.
    """
    function, cpu = LayerPass("model"), torch.device("cpu")
    layer = function.layer

    def damaged(*_: Any, package_path: BytesIO, **__: Any) -> None:
        package_path.write(b"damaged")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="passes: cannot be compiled"):
        patch.setattr(torch._inductor, "aoti_compile_and_package", damaged)
        assert package.compiled(function, (), cpu) is None
    assert [path.read_bytes() for path in own.glob("*.pt2")] == [b"damaged"]
    before, timed = time.perf_counter(), decoding_now_s()
    run = package.compiled(function, (), cpu)
    left_out_s = time.perf_counter() - before - (decoding_now_s() - timed)
    assert left_out_s > 0.5, "compilation counts for no time of a generation"
    assert run is not None and package.compiled(function, (), cpu) is not None  # from disk
    assert capsys.readouterr().err.count("compiling a layer") == 2
    x = torch.randn(3, 4)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(run([x])[0], layer(x))
        layer.weight.data, layer.bias = torch.randn(4, 4), nn.Parameter(torch.randn(4))
        run.refresh()


def test_no_compiler(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MIN_BYTES", 0)
    monkeypatch.setattr(kernels, "kernels", kernels.kernels.__wrapped__)
    target = make_qwen(**LAYERS)
    with torch._inductor.config.patch({"cpp.cxx": ("/nowhere/g++",)}), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = answer(target, None, PassMode.compiled, "autoregressive")
    messages = [str(one.message) for one in caught if str(one.message).startswith("passes:")]
    assert len(messages) == 1 and "compiler" in messages[0].lower()
    assert found == answer(target, None, PassMode.eager, "autoregressive")

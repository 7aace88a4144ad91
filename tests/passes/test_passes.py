"""Passes as functions of tensors, plain, with static buffers and compiled: the same trees and texts as eager passes."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import refused
from support.models import in_float64, make_inputs, make_qwen, random_draft, text_sizes
from support.near_draft import near_draft
from torch import nn
from transformers import LlamaConfig, Qwen3VLConfig

import sage
from sage.chat import Chat
from sage.pass_modes import MANY_ANSWERS, PassMode, resolve_pass_mode
from sage.passes import package, select, sessions, target_passes
from sage.passes.buckets import key_bucket, node_bucket
from sage.passes.capture import CachePool, CapturedLevels, CapturedTreePasses, call_again
from sage.passes.package import Eager
from sage.targets.families import family_of

FORMS = ("functions", "captured")
POLICIES = ("autoregressive", "chain", "static", "eagle2", "spec_llava", "ddd", "talon", "sage")
DRAFTS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle3": {"feature_levels": [1, 2, 3], "draft_vocab_size": 40, "vocabulary": torch.arange(0, 60, 1)[:40]},
}

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 16}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
VISION |= {"num_position_embeddings": 16, "deepstack_visual_indexes": (0, 1)}
IDS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
FAMILY_CONFIGS = (
    (LlamaConfig(**text_sizes(rope_parameters=LLAMA3_ROPE)), "autoregressive"),
    (Qwen3VLConfig(text_config=text_sizes(head_dim=16, rope_parameters=MROPE), vision_config=VISION, **IDS), "static"),
)


def head(target: sage.Target, *args: Any, **options: Any) -> Any:
    """A draft head for decoding; one in training runs eagerly."""
    return random_draft(target, *args, **options).eval()


def run_eagerly(module: nn.Module, example: package.Example, label: str, depends_on: Any) -> Eager:
    """In place of `package.compiled`: the same function, not compiled."""
    return Eager(module, example()[0])


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PassMode:
    """Both forms without a compiler and without a GPU; returns the pass mode that selects them."""
    for module in (target_passes, sessions):
        monkeypatch.setattr(module, "compiled", run_eagerly)
    monkeypatch.setattr(select, "CapturedTreePasses", partial(CapturedTreePasses, capture=call_again))
    monkeypatch.setattr(select, "CapturedLevels", partial(CapturedLevels, capture=call_again))
    return PassMode.compiled if request.param == "functions" else PassMode.captured


def answer(target: sage.Target, draft: Any, passes: PassMode, policy: str, **options: Any) -> tuple[list[int], list[Any]]:
    """Returns tokens, and the shape and outcome of every tree."""
    target.passes = passes
    inputs = make_inputs(target)
    inputs = {key: value.to(target.dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    out = sage.generate(target, None if policy == "autoregressive" else draft, inputs, policy, max_new_tokens=40, **options)
    return out.tokens.tolist(), [(row["nodes"], row["depth"], row["accepted"]) for row in out.stats.rounds_log]


class TestFormsAgree:
    @pytest.mark.parametrize("kind", DRAFTS)
    @pytest.mark.parametrize("policy", POLICIES)
    def test_trees_and_texts(self, tiny_target: sage.Target, form: PassMode, kind: str, policy: str) -> None:
        in_float64(tiny_target, {})
        options = {key: value for key, value in DRAFTS[kind].items() if key != "draft_vocab_size"}
        draft = head(tiny_target, kind, **options).double()
        assert answer(tiny_target, draft, form, policy) == answer(tiny_target, draft, PassMode.eager, policy)

    @pytest.mark.parametrize("options", [{"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3}, {"min_new_tokens": 20}])
    def test_sampling_and_processors(self, tiny_target: sage.Target, form: PassMode, options: dict[str, Any]) -> None:
        in_float64(tiny_target, {})
        draft = head(tiny_target).double()
        expected = answer(tiny_target, draft, PassMode.eager, "static", **options)
        assert answer(tiny_target, draft, form, "static", **options) == expected

    @pytest.mark.parametrize("policy", ["chain", "static", "sage"])
    def test_accepted_paths(self, tiny_target: sage.Target, form: PassMode, policy: str) -> None:
        """A smaller target as the draft: its own passes are eager, many of its tokens are accepted."""
        in_float64(tiny_target, {})
        draft = near_draft(tiny_target)
        tokens, rounds = answer(tiny_target, draft, form, policy)
        assert (tokens, rounds) == answer(tiny_target, draft, PassMode.eager, policy)
        assert max(accepted for *_, accepted in rounds) >= 2

    def test_cost_aware(self, tiny_target: sage.Target, form: PassMode) -> None:
        draft = head(tiny_target)
        tokens, _ = answer(tiny_target, draft, form, "cost_aware")
        assert tokens == answer(tiny_target, draft, PassMode.eager, "autoregressive")[0]

    def test_compressor(self, tiny_target: sage.Target, form: PassMode) -> None:
        in_float64(tiny_target, {})
        draft = head(tiny_target, compressor={"kind": "pool", "ratio": 2}).double()
        assert answer(tiny_target, draft, form, "static") == answer(tiny_target, draft, PassMode.eager, "static")

    def test_weights_that_moved(self, tiny_qwen: sage.Target, form: PassMode) -> None:
        draft = head(tiny_qwen)
        first = answer(tiny_qwen, draft, form, "static")
        for weight in (*tiny_qwen.model.parameters(), *draft.parameters()):
            weight.data = weight.data.clone()
        assert answer(tiny_qwen, draft, form, "static") == first
        tiny_qwen.model.lm_head.weight.data = -tiny_qwen.model.lm_head.weight.data
        assert answer(tiny_qwen, draft, form, "static") == answer(tiny_qwen, draft, PassMode.eager, "static") != first


class TestTheModelDraft:
    def test_a_copy_of_the_target_in_every_form(self, tiny_qwen: sage.Target, form: PassMode) -> None:
        assert answer(tiny_qwen, near_draft(tiny_qwen, 0.0), form, "chain")[1][0][2] > 0


class TestBuckets:
    @pytest.mark.parametrize(("count", "expected"), [(1, 1), (2, 2), (3, 4), (26, 32), (64, 64), (65, 128)])
    def test_nodes(self, count: int, expected: int) -> None:
        assert node_bucket(count) == expected

    @pytest.mark.parametrize(("count", "expected"), [(1, 256), (257, 512), (1024, 1024), (1025, 2048), (5000, 5120)])
    def test_keys(self, count: int, expected: int) -> None:
        assert key_bucket(count) == expected

    def test_number_of_captures_is_bounded(self, tiny_qwen: sage.Target) -> None:
        """One per bucket, whatever the lengths of prompts and trees; none for a second request."""
        captures: list[int] = []

        def counting(function: Any) -> Any:
            captures.append(1)
            return call_again(function)

        passes = CapturedTreePasses(tiny_qwen, (), counting)
        for _ in range(2):
            cache = passes.new_cache(400)
            for nodes in (1, 2, 3, 5, 8, 1, 7):
                run_chain(passes, cache, nodes)
            assert len(captures) == 4
            del cache


def run_chain(passes: Any, cache: Any, nodes: int) -> Any:
    from sage.trees.tree import Columns, Tree

    depths = list(range(nodes))
    tree = Tree.of(Columns([2 + depth for depth in depths], [depth - 1 for depth in depths], depths))
    with torch.inference_mode():
        return passes(tree, torch.tensor([cache.length]), cache)


class TestCaches:
    def test_buffers_are_used_again(self, tiny_qwen: sage.Target) -> None:
        pool = CachePool(tiny_qwen.new_cache)
        first = pool(100)
        address = first.buffers[0].data_ptr()
        other = pool(100)
        assert other.buffers[0].data_ptr() != address
        del first
        again = pool(200)
        assert again.buffers[0].data_ptr() == address and again.length == 0 and again.capacity == 256

    def test_prompt_longer_than_every_bucket_so_far(self, tiny_qwen: sage.Target) -> None:
        passes = CapturedTreePasses(tiny_qwen, (), call_again)
        cache = passes.new_cache(1500)
        cache.zero_to(1400)
        eager = tiny_qwen.new_cache(1500)
        eager.zero_to(1400)
        found = run_chain(passes, cache, 3)
        expected = run_chain(target_passes.EagerTreePasses(tiny_qwen, ()), eager, 3)
        torch.testing.assert_close(found.logits, expected.logits)
        assert cache.length == eager.length

    def test_second_turn_of_a_chat(self, form: PassMode) -> None:
        from support.processors import make_processor

        texts = []
        for passes in (form, PassMode.eager):
            target = sage.Target(make_qwen().model, make_processor(make_qwen()))
            target.passes = passes
            chat = Chat(target, head(target), "static", max_new_tokens=12)
            texts.append([chat.ask("a b c").tokens.tolist(), chat.ask("d e").tokens.tolist()])
        assert texts[0] == texts[1]


class TestFailures:
    def test_capture_that_fails(self, tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(function: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

        monkeypatch.setattr(select, "CapturedTreePasses", partial(CapturedTreePasses, capture=failing))
        monkeypatch.setattr(select, "CapturedLevels", partial(CapturedLevels, capture=failing))
        draft = head(tiny_qwen)
        with pytest.warns(UserWarning, match="passes: the (target|draft)'s pass cannot be captured") as caught:
            found = answer(tiny_qwen, draft, PassMode.captured, "static")
        assert len(caught) == 2
        assert found == answer(tiny_qwen, draft, PassMode.eager, "static")

    def test_compilation_that_fails(self, tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def failing(*args: Any, **options: Any) -> None:
            raise RuntimeError("No working C++ compiler found")

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(torch.export, "export", failing)
        draft = head(tiny_qwen)
        with pytest.warns(UserWarning, match="cannot run compiled .*No working C.* it runs eagerly"):
            found = answer(tiny_qwen, draft, PassMode.compiled, "static")
        assert found == answer(tiny_qwen, draft, PassMode.eager, "static")
        assert not list((tmp_path / "sage-draft" / "passes").iterdir())

    def test_interrupted_compilation_leaves_nothing(
        self, tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def interrupted(*args: Any, **options: Any) -> None:
            Path(options["package_path"]).write_bytes(b"half")
            raise KeyboardInterrupt

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer(tiny_qwen, None, PassMode.compiled, "autoregressive")
        assert not list((tmp_path / "sage-draft" / "passes").iterdir())


class TestModes:
    @pytest.mark.parametrize(
        ("name", "device", "num_answers", "is_whole", "expected"),
        [
            ("auto", "cpu", 1, True, "eager"),
            ("auto", "cpu", MANY_ANSWERS, True, "compiled"),
            ("auto", "cuda", 1, True, "captured"),
            ("auto", "cuda", 1, False, "eager"),
            ("compiled", "cpu", 1, True, "compiled"),
            ("compiled", "cpu", 1, False, "eager"),
            ("eager", "cuda", 500, True, "eager"),
        ],
    )
    def test_resolution(self, name: str, device: str, num_answers: int, is_whole: bool, expected: str) -> None:
        assert resolve_pass_mode(name, device, num_answers, is_whole) is PassMode(expected)

    def test_mistakes_are_refused_before_anything_is_loaded(self) -> None:
        with refused("passes: 'fast' is unknown"):
            sage.load_target("no/such/folder", passes="fast")
        with refused("passes: captured needs a GPU"):
            sage.load_target("no/such/folder", passes="captured")


@pytest.mark.slow
class TestCompiled:
    def test_once_per_pass_and_from_disk(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
        """One compilation for one node and one for several, whatever the shapes; none for other weights."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        target = make_qwen()
        draft = head(target)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            found = answer(target, draft, PassMode.compiled, "static")
            assert found == answer(target, draft, PassMode.eager, "static")
            folder = tmp_path / "sage-draft" / "passes"
            count = len(list(folder.glob("*.pt2")))
            assert 1 < count == capsys.readouterr().err.count("compiling")
            for _ in range(2):
                other = make_qwen(seed=1)
                drafts = head(other, seed=1)
                assert answer(other, drafts, PassMode.compiled, "static") == answer(other, drafts, PassMode.eager, "static")
                compiled = capsys.readouterr().err.count("compiling")
            assert len(list(folder.glob("*.pt2"))) <= 6 and compiled == 0
        for path in folder.glob("*.pt2"):
            path.write_bytes(b"damaged")
        target.functions.clear()
        assert answer(target, None, PassMode.compiled, "autoregressive")[0] == found[0]
        assert capsys.readouterr().err.count("compiling") == 1

    @pytest.mark.parametrize(("config", "policy"), FAMILY_CONFIGS, ids=[config.model_type for config, _ in FAMILY_CONFIGS])
    def test_other_families(self, config: Any, policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Scaled rope; queries and keys with norms, interleaved M-RoPE, deepstack in the prefill."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        torch.manual_seed(0)
        target = sage.Target(family_of(config).auto_class.from_config(config))
        target.model.lm_head.weight.data[60:64] = 0  # no slot is ever generated, as in a trained model
        draft = random_draft(target)  # in training mode: its levels run eagerly and cost no compilation
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            found = answer(target, draft, PassMode.compiled, policy)
        assert found == answer(target, draft, PassMode.eager, policy)
        assert list((tmp_path / "sage-draft" / "passes").glob("*.pt2"))

    def test_small_weights_are_not_part_of_the_code(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Inductor writes up to 8 numbers into the code unless it is told not to; a package serves any weights."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        layer = nn.Linear(4, 4)

        def example() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            return (torch.zeros(3, 4),), (None,)

        run = package.compiled(layer, example, "a layer", "model")
        assert not isinstance(run, Eager)
        x = torch.randn(3, 4)
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(run([x])[0], layer(x))
            layer.weight.data, layer.bias = torch.randn(4, 4), nn.Parameter(torch.randn(4))
            run.refresh()

    def test_full_cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A tree up to the last row of the cache; a call that fails runs eagerly."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        target = make_qwen()
        target.passes = PassMode.compiled
        passes: Any = select.new_tree_passes(target, ())
        eager = target_passes.EagerTreePasses(target, ())
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            found = run_chain(passes, passes.new_cache(5), 5)
        torch.testing.assert_close(found.logits, run_chain(eager, eager.new_cache(5), 5).logits)
        with pytest.warns(UserWarning, match="several nodes cannot run compiled"):
            found = run_chain(passes, eager.new_cache(5), 5)
        torch.testing.assert_close(found.logits, run_chain(eager, eager.new_cache(5), 5).logits)

    def test_no_compiler(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/nowhere/g++",))
        target = make_qwen()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = answer(target, None, PassMode.compiled, "autoregressive")
        messages = [str(one.message) for one in caught if str(one.message).startswith("passes:")]
        assert len(messages) == 1 and "compiler" in messages[0].lower()
        assert found == answer(target, None, PassMode.eager, "autoregressive")

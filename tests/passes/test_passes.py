"""Passes as functions of tensors, plain and with static buffers: the same trees and texts as eager passes."""

import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.family_passes import use_cuda_layouts
from support.messages import refused
from support.models import EAGLE_3_1, in_float64, make_llava, make_qwen, near_draft
from support.pass_helpers import answer, call_again, capture_with, head, run_chain, without_compiler
from support.processors import make_processor

import sage
from sage.decoding.generation import Chat
from sage.runtime import captured, executors
from sage.runtime.captured import MAX_FAILURES, MAX_FREE, CachePool, Captured, CapturedFunction, StaticCall
from sage.runtime.executors import describe_passes, executor_of, passes_as
from sage.runtime.modes import MANY_ANSWERS, PassMode, resolve_pass_mode
from sage.runtime.pass_function import EAGER, Argument, Padding, key_bucket, node_bucket
from sage.targets.tree_passes import TreePasses

FORMS = ("functions", "captured")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PassMode:
    """Both forms without a compiler and without a GPU; returns the pass mode that selects them."""
    without_compiler(monkeypatch)
    capture_with(monkeypatch, call_again)
    use_cuda_layouts(monkeypatch)
    return PassMode.compiled if request.param == "functions" else PassMode.captured


class TestFormsAgree:
    @pytest.mark.parametrize(
        ("kind", "policy"),  # one node, levels of one, changing widths, more nodes than a bucket
        [("eagle", "autoregressive"), ("eagle3", "chain"), ("eagle", "sage"), ("eagle3", "spec_llava")],
    )
    def test_trees_and_texts(self, form: PassMode, kind: str, policy: str) -> None:
        target = make_llava() if kind == "eagle3" else make_qwen()
        in_float64(target, {})
        options = {**EAGLE_3_1, "vocabulary": torch.arange(40)} if kind == "eagle3" else {}
        draft = head(target, kind, **options).double()
        assert answer(target, draft, form, policy) == answer(target, draft, PassMode.eager, policy)

    @pytest.mark.parametrize("options", [{"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3}, {"min_new_tokens": 20}])
    def test_sampling_and_processors(self, tiny_qwen: sage.Target, form: PassMode, options: dict[str, Any]) -> None:
        in_float64(tiny_qwen, {})
        draft = head(tiny_qwen).double()
        expected = answer(tiny_qwen, draft, PassMode.eager, "static", **options)
        assert answer(tiny_qwen, draft, form, "static", **options) == expected

    @pytest.mark.slow
    def test_cost_aware(self, tiny_qwen: sage.Target, form: PassMode) -> None:
        draft = head(tiny_qwen)
        tokens, _ = answer(tiny_qwen, draft, form, "cost_aware")
        assert tokens == answer(tiny_qwen, draft, PassMode.eager, "autoregressive")[0]

    def test_compressor(self, tiny_qwen: sage.Target, form: PassMode) -> None:
        in_float64(tiny_qwen, {})
        draft = head(tiny_qwen, compressor={"kind": "pool", "ratio": 2}).double()
        assert answer(tiny_qwen, draft, form, "static") == answer(tiny_qwen, draft, PassMode.eager, "static")

    def test_weights_that_moved(self, tiny_qwen: sage.Target, form: PassMode) -> None:
        draft = head(tiny_qwen)
        first = answer(tiny_qwen, draft, form, "static")
        for weight in (*tiny_qwen.model.parameters(), *draft.parameters()):
            weight.data = weight.data.clone()
        assert answer(tiny_qwen, draft, form, "static") == first
        tiny_qwen.model.lm_head.weight.data = -tiny_qwen.model.lm_head.weight.data
        assert answer(tiny_qwen, draft, form, "static") == answer(tiny_qwen, draft, PassMode.eager, "static") != first

    def test_the_model_draft(self, tiny_llava: sage.Target, form: PassMode) -> None:
        """A smaller target as the draft, many of whose tokens are accepted."""
        in_float64(tiny_llava, {})
        draft = near_draft(tiny_llava)
        expected = answer(tiny_llava, draft, PassMode.eager, "sage")
        assert answer(tiny_llava, draft, form, "sage") == expected
        assert draft.model.functions and max(accepted for *_, accepted in expected[1]) >= 2


class TestBuckets:
    def test_sizes(self) -> None:
        assert [node_bucket(count) for count in (1, 2, 3, 26, 64, 65)] == [1, 2, 4, 32, 64, 128]
        assert [key_bucket(count) for count in (1, 257, 1024, 1025, 5000)] == [256, 512, 1024, 2048, 5120]

    @pytest.mark.parametrize(("is_split", "expected"), [(True, 4), (False, 8)])
    def test_number_of_captures_is_bounded(self, tiny_qwen, monkeypatch, is_split, expected):
        """One per bucket of nodes, whatever the lengths; none for a second request. Without the kernels of attention in two
        parts, one per bucket of nodes and keys.
        """
        monkeypatch.setattr(captured, "why_masked", lambda *_: "" if is_split else "a reason")
        captures: list[int] = []

        def counting(function: Any) -> Any:
            captures.append(1)
            return call_again(function)

        passes, eager = TreePasses(tiny_qwen, (), Captured(counting)), TreePasses(tiny_qwen, (), EAGER)
        for _ in range(2):
            cache, other = passes.new_cache(400), tiny_qwen.new_cache(400)
            for nodes in (1, 2, 3, 5, 8, 1, 7):
                for length in (10, 300):
                    for one in (cache, other):
                        one.zero_to(length)
                    found = run_chain(passes, cache, nodes)
                    torch.testing.assert_close(found.logits, run_chain(eager, other, nodes).logits)
            assert len(captures) == expected
            del cache

    @pytest.mark.parametrize("form", ["captured"], indirect=True)
    def test_levels_and_commits_are_graphs(self, tiny_qwen: sage.Target, form: PassMode) -> None:
        """Within a bucket each: commits of several lengths and levels of several widths are captured a few times."""
        draft = head(tiny_qwen)
        answer(tiny_qwen, draft, form, "static")
        for function in draft.pass_functions(tiny_qwen):
            captured = function.kept[executor_of(form)]
            assert isinstance(captured, CapturedFunction)
            counts = [count for _, count, *_ in captured.graphs]
            assert 1 <= len(set(counts)) == len(counts) <= 4


class TestCaches:
    def test_buffers_are_used_again(self, tiny_qwen: sage.Target) -> None:
        pool = partial(CachePool(), make=tiny_qwen.new_cache)
        first = pool(256)
        address = first.buffers[0].data_ptr()
        other = pool(256)
        assert other.buffers[0].data_ptr() != address
        del first
        again = pool(200)
        assert again.buffers[0].data_ptr() == address and again.length == 0 and again.capacity == 256

    def test_second_turn_of_a_chat(self, form: PassMode) -> None:
        texts = []
        for passes in (form, PassMode.eager):
            target = sage.Target(make_qwen().model, make_processor(make_qwen()))
            target.passes = passes
            chat = Chat(target, head(target), "static", max_new_tokens=12)
            texts.append([chat.ask("a b c").tokens.tolist(), chat.ask("d e").tokens.tolist()])
        assert texts[0] == texts[1]

    @pytest.mark.slow
    @pytest.mark.parametrize("form", ["captured"], indirect=True)
    def test_a_chat_that_grows_keeps_one_cache(self, form: PassMode) -> None:
        """Graphs of caches that a chat has outgrown are dropped with them."""
        target = sage.Target(make_qwen().model, make_processor(make_qwen()))
        target.passes = form
        draft = head(target)
        chat = Chat(target, draft, "static", max_new_tokens=40)
        executor, capacities = executor_of(form), []
        for _ in range(3):
            chat.ask("a b c")
            capacities.append(chat._prefix.cache.capacity)
        assert capacities[0] < capacities[-1]
        used = [one for one in (*target.functions.values(), *draft.pass_functions(target)) if executor in one.kept]
        assert len(used) == 3
        for function in used:
            owner = draft if function.owner == "draft" else target
            executor.bind(function)
            addresses = {address for address, *_ in function.kept[executor].graphs}
            assert addresses <= executor._pools[owner].addresses() and len(addresses) == (1 if owner is target else 2)

    def test_free_buffers_are_bounded(self, tiny_qwen: sage.Target) -> None:
        pool = CachePool()
        caches = [pool(256 * number, tiny_qwen.new_cache) for number in range(1, MAX_FREE + 3)]
        assert len(pool.addresses()) == MAX_FREE + 2
        del caches
        assert len(pool.addresses()) == MAX_FREE

    @pytest.mark.slow
    @pytest.mark.parametrize("form", ["captured"], indirect=True)
    def test_memory_is_freed_at_the_end_of_a_measurement(self, tiny_qwen, form, monkeypatch):
        monkeypatch.setattr(executors, "resolve_pass_mode", lambda *_: form)
        draft, executor = head(tiny_qwen), executor_of(form)
        with passes_as("auto", tiny_qwen, num_answers=1):
            first = answer(tiny_qwen, draft, form, "static")
            kept = [function for function in (*tiny_qwen.functions.values(), *draft.pass_functions(tiny_qwen)) if function.kept]
            free = (shared for pool in executor._pools.values() for shared in pool._free)
            buffers = [weakref.ref(buffer) for shared in free for buffer in shared.buffers]
            del free
            assert len(kept) == 3 and buffers and all(buffer() is not None for buffer in buffers)
        assert tiny_qwen.passes is PassMode.eager
        assert not any(function.kept for function in kept) and all(buffer() is None for buffer in buffers)
        assert answer(tiny_qwen, draft, form, "static") == first

    @pytest.mark.parametrize("form", ["captured"], indirect=True)
    def test_a_request_after_one_with_nan_gives_its_text(self, tiny_qwen: sage.Target, form: PassMode) -> None:
        """Padding attends to rows of the request before with a weight of 0, and 0 times NaN is NaN."""
        draft = head(tiny_qwen)
        expected = answer(tiny_qwen, draft, PassMode.eager, "static")
        answer(tiny_qwen, draft, form, "static")
        weight = tiny_qwen.text_model.layers[0].self_attn.v_proj.weight
        before = weight.data.clone()
        weight.data.fill_(float("nan"))
        with pytest.raises(ValueError, match="NaN"):
            answer(tiny_qwen, draft, form, "static", min_new_tokens=20)
        weight.data.copy_(before)
        assert answer(tiny_qwen, draft, form, "static") == expected

    def test_captures_of_a_device_share_a_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """cuBLAS keeps a workspace for every stream, of the warm-up as of the capture."""
        for name in ("Stream", "stream", "graph", "CUDAGraph", "current_stream", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
        for _ in range(2):
            captured.cuda_graph(lambda: [torch.zeros(1)])
        one = torch.cuda.Stream.return_value
        assert torch.cuda.Stream.call_count == 1
        assert {call.args[0] for call in torch.cuda.stream.call_args_list} == {one} == {torch.cuda.graph.call_args.args[2]}
        captured._stream.cache_clear(), captured._pool.cache_clear()

    def test_released_workspaces_precede_the_memory_that_is_returned(self, monkeypatch: pytest.MonkeyPatch) -> None:
        freed = mock.MagicMock()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", freed.workspaces, raising=False)
        monkeypatch.setattr(torch.cuda, "empty_cache", freed.memory)
        Captured(call_again).release()
        assert freed.mock_calls == [mock.call.workspaces(), mock.call.memory()]


class TestFailures:
    def test_a_capture_is_tried_again(self, tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
        """A failure may be due to something else on the device."""
        tries: list[int] = []

        def failing(function: Any) -> Any:
            tries.append(1)
            if len(tries) < MAX_FAILURES:
                raise RuntimeError("operation not permitted when stream is capturing")
            return call_again(function)

        capture_with(monkeypatch, failing)
        with pytest.warns(UserWarning, match="target's pass cannot be captured"):
            found = answer(tiny_qwen, None, PassMode.captured, "autoregressive")
        assert found == answer(tiny_qwen, None, PassMode.eager, "autoregressive") and len(tries) == MAX_FAILURES

    @pytest.mark.slow
    def test_a_wrong_padding_row_is_noticed(self, tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
        """`auto` compares the first pass of each shape with the eager one, before anything is lost; `captured` does not."""
        pad = StaticCall._pad

        def on_the_first_token(call: StaticCall, argument: Argument, static: Any) -> Any:
            return static.zero_() if argument.padding is Padding.spare else pad(call, argument, static)

        capture_with(monkeypatch, call_again)
        draft = head(tiny_qwen)
        expected = answer(tiny_qwen, draft, PassMode.eager, "sage")
        assert answer(tiny_qwen, draft, PassMode.auto, "sage") == expected
        assert describe_passes(tiny_qwen) == "captured, with keys in two parts"
        monkeypatch.setattr(StaticCall, "_pad", on_the_first_token)
        capture_with(monkeypatch, call_again)
        assert answer(tiny_qwen, draft, PassMode.captured, "sage") != expected
        with pytest.warns(UserWarning, match="captured pass of the (target|draft) .* differs .* run eagerly") as caught:
            assert answer(tiny_qwen, draft, PassMode.auto, "sage") == expected
        assert len(caught) == 1 and answer(tiny_qwen, draft, PassMode.auto, "sage") == expected
        assert describe_passes(tiny_qwen).startswith("eager, because a captured pass of the ")

    def test_capture_that_fails(self, tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(function: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

        capture_with(monkeypatch, failing)
        draft = head(tiny_qwen)
        with pytest.warns(UserWarning, match="passes: the (target|draft)'s pass cannot be captured") as caught:
            found = answer(tiny_qwen, draft, PassMode.captured, "static")
        assert len(caught) == 2
        for owner in ("target", "draft"):
            assert f"the {owner}'s pass cannot be captured (operation not permitted" in describe_passes(tiny_qwen)
        assert found == answer(tiny_qwen, draft, PassMode.eager, "static")

    def test_compilation_that_fails(self, tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def failing(*args: Any, **options: Any) -> None:
            raise RuntimeError("No working C++ compiler found")

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(torch.export, "export", failing)
        draft = head(tiny_qwen)
        with pytest.warns(UserWarning, match="passes: cannot be compiled .*No working C.* run eagerly") as caught:
            found = answer(tiny_qwen, draft, PassMode.compiled, "static")
        assert len(caught) == 1  # for several functions
        assert found == answer(tiny_qwen, draft, PassMode.eager, "static")
        assert not list((tmp_path / "sage-draft" / "passes").iterdir())

    @pytest.mark.slow
    def test_interrupted_compilation_leaves_nothing(self, tiny_qwen, monkeypatch, tmp_path):
        def interrupted(*args: Any, **options: Any) -> None:
            options["package_path"].write(b"half")
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
            ("auto", "cuda", 1, True, "auto"),
            ("auto", "cuda", 1, False, "eager"),
            ("compiled", "cpu", 1, True, "compiled"),
            ("compiled", "cpu", 1, False, "eager"),
            ("eager", "cuda", 500, True, "eager"),
        ],
    )
    def test_resolution(self, name: str, device: str, num_answers: int, is_whole: bool, expected: str) -> None:
        assert resolve_pass_mode(name, device, num_answers, is_whole) is PassMode(expected)

    def test_mistakes_are_refused_before_anything_is_loaded(self) -> None:
        with refused("passes: 'fast' is not allowed"):
            sage.load_target("no/such/folder", passes="fast")
        with refused("passes: captured needs a GPU"):
            sage.load_target("no/such/folder", passes="captured")

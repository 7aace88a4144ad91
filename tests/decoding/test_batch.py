"""Several requests decoded together: each text is the one that the request has alone."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import make_inputs, make_llava, make_qwen, random_draft
from support.toy_helpers import make_policy

import sage
from sage.decoding.batch import BatchDecoder
from sage.decoding.generation import Generation
from sage.runtime import packing
from sage.runtime.cache import SharedCache
from sage.runtime.packing import BoundPass, Pass
from sage.targets.tree_passes import TreePass

MAKERS = {
    "qwen": make_qwen,
    "llava": make_llava,
    "window": lambda: make_qwen(sliding_window=6, use_sliding_window=True, max_window_layers=1),
}
OPTIONS: dict[str, Any] = {
    "eagle": {},
    "eagle3": {},
    "peagle": {"block_size": 4},
    "block": {"block_size": 4, "conditional": "mlp", "conditional_rank": 8},
    "model": {"num_layers": 1},
}
POLICIES = [name for name in sage.POLICIES if name != "spec_llava"]  # spec_llava drafts 127 nodes


def some_inputs(target: sage.Target, count: int) -> list[Any]:
    return [make_inputs(target, seed, 14 + seed % 5) for seed in range(count)]


def text_alone(target: sage.Target, draft: Any, inputs: Any, policy: str, **options: Any) -> list[int]:
    return sage.generate(target, draft, inputs, policy=make_policy(policy, {}), **options).tokens.tolist()


@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen", "eagle"), ("llava", "eagle3"), pytest.param("window", "eagle", marks=pytest.mark.slow)],
)
def test_requests_that_join_and_leave_at_random_have_their_own_texts(family: str, kind: str) -> None:
    """Policies, seeds, temperatures and lengths differ; rows are taken again, and two requests leave before their end."""
    target = MAKERS[family]()
    draft = random_draft(target, kind)
    chance, inputs = random.Random(0), some_inputs(target, 2 * len(POLICIES))
    settings = [
        {"max_new_tokens": chance.randint(1, 12), "temperature": chance.choice([0.0, 0.8]), "seed": number}
        for number in range(len(inputs))
    ]
    decoder = BatchDecoder(target, draft, 4, prefill_tokens=6 if kind == "eagle3" else None)
    requests: list[Generation] = []
    tokens: dict[Generation, list[int]] = {}
    while len(requests) < len(inputs) or len(decoder):
        for _ in range(chance.randint(0, 2)):
            if len(requests) < len(inputs):
                number = len(requests)
                policy = make_policy(POLICIES[number % len(POLICIES)], {})
                requests.append(decoder.add(inputs[number], policy, **settings[number]))
        for request, emitted in decoder.step():
            tokens.setdefault(request, []).extend(emitted.tokens)
        if len(requests) in (5, 9):
            decoder.remove(requests[-1])
    complete = [number for number, request in enumerate(requests) if request.is_over]
    assert len(complete) >= len(inputs) - 2
    for number in complete:
        alone = text_alone(target, draft, inputs[number], POLICIES[number % len(POLICIES)], **settings[number])
        assert requests[number].output().tokens.tolist() == tokens[requests[number]] == alone, number


@pytest.mark.parametrize("kind", OPTIONS)
def test_requests_share_draft_passes_with_the_results_that_each_has_alone(kind, tiny_qwen, monkeypatch):
    """Texts do not depend on drafts, so results are compared: of every pass of several requests with those of each alone."""
    draft = (
        sage.new_draft(tiny_qwen, kind, **OPTIONS[kind]) if kind == "model" else random_draft(tiny_qwen, kind, **OPTIONS[kind])
    )
    run, sizes = BoundPass.run_several, dict[str, set[int]]()

    def compared(self: BoundPass, needed: list[Pass]) -> Any:
        expected = [[result.clone() for result in self.run_one(each)] for each in needed]
        found = run(self, needed)
        for own, alone in zip(found, expected, strict=True):
            for result, reference in zip(own, alone, strict=True):
                torch.testing.assert_close(result, reference, atol=1e-4, rtol=1e-4)
        sizes.setdefault(type(self.function).__name__, set()).add(len(needed))
        return found

    monkeypatch.setattr(BoundPass, "run_several", compared)
    inputs = some_inputs(tiny_qwen, 3)
    out = sage.generate_batch(tiny_qwen, draft, inputs, "static", batch_size=3, max_new_tokens=8)
    for one, own in zip(out, inputs, strict=True):
        alone = sage.generate(tiny_qwen, draft, own, policy="static", max_new_tokens=8)
        assert one.tokens.tolist() == alone.tokens.tolist() and one.stats.accepted == alone.stats.accepted
    assert all(3 in of_function for of_function in sizes.values()), sizes


def test_a_round_makes_one_target_pass(tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = BatchDecoder(tiny_qwen, random_draft(tiny_qwen), 4)
    for inputs in some_inputs(tiny_qwen, 4):
        decoder.add(inputs, "chain", max_new_tokens=8)
    decoder.step()
    passes, run = [], tiny_qwen.run
    monkeypatch.setattr(tiny_qwen, "run", lambda *args, **more: (passes.append(args[0].shape), run(*args, **more))[1])
    decoder.step()
    assert passes == [(1, 4 * 6, 32)]


@pytest.mark.parametrize("fault", ["positions", "rows"])
def test_negative_control_what_is_a_neighbours_gives_another_text(fault, tiny_qwen, monkeypatch):
    """Positions, or the cache rows to write, in the order of another request."""
    draft, inputs = random_draft(tiny_qwen), some_inputs(tiny_qwen, 4)
    expected = [text_alone(tiny_qwen, draft, one, "chain", max_new_tokens=8) for one in inputs]
    compute, layout = TreePass.compute, packing.layout

    def of_a_neighbour(self: TreePass, inputs: Any) -> Any:
        return compute(self, replace(inputs, positions=inputs.positions.flip(0)))

    def swapped(*args: Any) -> Any:
        found = layout(*args)
        return replace(found, owners=found.owners.flip(0))

    if fault == "positions":
        monkeypatch.setattr(TreePass, "compute", of_a_neighbour)
    else:
        monkeypatch.setattr(packing, "layout", swapped)
    out = sage.generate_batch(tiny_qwen, draft, inputs, "chain", batch_size=4, max_new_tokens=8)
    assert [one.tokens.tolist() for one in out] != expected


def test_a_request_that_fails_leaves_the_others_alone(tiny_qwen: sage.Target) -> None:
    first, second = some_inputs(tiny_qwen, 2)
    decoder = BatchDecoder(tiny_qwen, None, 2)
    bad = decoder.add(first, "autoregressive", max_new_tokens=9, logits_processor=[raising])
    good = decoder.add(second, "autoregressive", max_new_tokens=9)
    while len(decoder):
        decoder.step()
    assert good.output().tokens.tolist() == text_alone(tiny_qwen, None, second, "autoregressive", max_new_tokens=9)
    with pytest.raises(RuntimeError, match="broken"):
        bad.output()


@pytest.mark.slow
def test_a_request_without_room_in_the_caches_fails_alone_and_frees_its_rows(tiny_qwen, monkeypatch):
    draft, (first, second) = random_draft(tiny_qwen), some_inputs(tiny_qwen, 2)
    decoder = BatchDecoder(tiny_qwen, draft, 2)
    good = decoder.add(first, "chain", max_new_tokens=9)
    decoder.step()
    bad = decoder.add(second, "chain", max_new_tokens=90)
    whole, grow = [], SharedCache.grow_to

    def fails_for_the_draft(self: SharedCache, capacity: int) -> None:
        if capacity > self.capacity and whole:
            raise RuntimeError("out of memory")
        whole.append(capacity)
        grow(self, capacity)

    with monkeypatch.context() as patch:
        patch.setattr(SharedCache, "grow_to", fails_for_the_draft)
        assert bad in [request for request, _ in decoder.step()]
    with pytest.raises(RuntimeError, match="out of memory"):
        bad.output()
    again = decoder.add(second, "chain", max_new_tokens=90)
    while len(decoder):
        decoder.step()
    for request, inputs, count in ((good, first, 9), (again, second, 90)):
        assert request.output().tokens.tolist() == text_alone(tiny_qwen, draft, inputs, "chain", max_new_tokens=count)


def test_a_cache_that_cannot_grow_stays_as_it_is() -> None:
    shared = SharedCache([torch.device("meta"), torch.device("cpu")], [(1, 4)] * 2, 8, torch.float32, num_rows=2)
    with pytest.raises(RuntimeError):
        shared.take(1 << 50)
    assert [buffer.shape[-2] for buffer in shared.buffers] == [8, 8]


def raising(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if ids.shape[1] > 16:
        raise RuntimeError("broken")
    return scores


@pytest.mark.parametrize("name", ["max_requests", "prefill_tokens"])
def test_sizes_below_one_are_refused(name: str, tiny_qwen: sage.Target) -> None:
    with pytest.raises(ValueError, match=f"{name}: 0 is not allowed; give an integer of at least 1"):
        BatchDecoder(tiny_qwen, None, **{name: 0})


def test_a_row_is_zeroed_for_every_request(tiny_qwen: sage.Target) -> None:
    """A pass attends to places that it must not see with a weight of 0, and 0 times the NaN of an earlier request is NaN."""
    shared = tiny_qwen.new_cache(8).shared.with_rows(2)
    first = shared.take(8)
    for buffer in shared.buffers:
        buffer.fill_(float("nan"))
    shared.release(first)
    again = shared.take(8)
    assert again.row == first.row and all((buffer[:, :, again.row] == 0).all() for buffer in shared.buffers)

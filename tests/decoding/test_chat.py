"""Conversations: the same text as one prompt with all turns, without prefilling the common prefix again."""

import pytest
import torch
from support.messages import refused
from support.models import in_double, random_draft
from support.processors import make_processor, random_image
from transformers import LogitsProcessor, LogitsProcessorList

import sage
from sage.decoding.generation import start
from sage.targets import Features

LENGTH = 12


@pytest.fixture
def target(tiny_target: sage.Target) -> sage.Target:
    """A target in float64, whose `prepare` gives float64 pixels."""
    tiny_target.model.double()
    target = sage.Target(tiny_target.model, make_processor(tiny_target))
    prepare = target.prepare
    target.prepare = lambda messages: in_double(prepare(messages))  # type: ignore[method-assign]
    return target


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "has_second_image"), [("eagle", True), ("eagle3", False)])
def test_turns_equal_a_new_request(target: sage.Target, kind: str, has_second_image: bool) -> None:
    draft = random_draft(target, kind, seed=0)
    chat = sage.Chat(target, draft, policy="static", max_new_tokens=LENGTH)
    chat.ask("one", images=[random_image(16, 8)])
    messages = [*chat.messages]
    images = [random_image(9, 9, 3)] if has_second_image else []
    generation = chat.start("two", images)
    known = generation.request.cache.length
    for _ in generation.rounds():
        pass
    second = chat.finish(generation)
    messages += [chat.messages[-2]]
    fresh = sage.generate(target, draft, target.prepare(messages), policy="static", max_new_tokens=LENGTH)
    assert torch.equal(second.tokens, fresh.tokens)
    assert second.stats.accepted == fresh.stats.accepted  # the draft reads the same context
    assert known > 0
    if not has_second_image:
        assert known > int(generation.request.prompt.visual_mask.sum())
    third = chat.ask("three")
    again = sage.generate(target, draft, target.prepare(chat.messages[:-1]), policy="static", max_new_tokens=LENGTH)
    assert torch.equal(third.tokens, again.tokens)


@pytest.mark.slow
def test_pruning_keeps_the_same_visual_tokens_in_a_later_turn(target: sage.Target) -> None:
    draft = random_draft(target, seed=0)
    options = {"policy": "static", "max_new_tokens": LENGTH, "pruning": sage.Pruning(0.5)}
    chat = sage.Chat(target, draft, **options)
    first = chat.start("one", [random_image(16, 8)])
    for _ in first.rounds():
        pass
    chat.finish(first)
    second = chat.start("two")
    for _ in second.rounds():
        pass
    prompts = [g.request.pruning(g.request.prompt, Features.join(g.request.features)) for g in (first, second)]
    kept = [p.kept[p.visual_mask[0, p.kept]].tolist() for p in prompts]
    assert kept[0] == kept[1]
    assert kept[0]


def test_prefix_ends_at_the_first_difference(tiny_qwen: sage.Target) -> None:
    ids = torch.randint(2, 60, (1, 9))
    generation = start(tiny_qwen, None, {"input_ids": ids}, policy="autoregressive", max_new_tokens=4, keep_prefix=True)
    for _ in generation.rounds():
        pass
    past = generation.prefix()
    assert past.ids.tolist() == [*ids[0].tolist(), *generation.tokens[:-1]]
    other = ids.clone()
    other[0, 5] = (int(ids[0, 5]) + 1) % 60
    cache, read = past.reuse(tiny_qwen.embed({"input_ids": other}), 64)
    assert cache.length == 5
    assert read[0].last.shape[1] == 5


def test_vision_tower_runs_once_per_image(target: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = sage.Chat(target, None, policy="autoregressive", max_new_tokens=3)
    chat.ask("one", images=[random_image(16, 8)])
    monkeypatch.setattr(target.family, "visual_features", lambda *_: pytest.fail("the vision tower ran again"))
    chat.ask("two")


class Breaks(LogitsProcessor):
    """Fails during an answer."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ValueError("in the middle")


def test_unfinished_turn_leaves_the_conversation_unchanged(target: sage.Target) -> None:
    chat = sage.Chat(target, None, policy="autoregressive", max_new_tokens=3, system="be brief")
    chat.ask("one", images=[random_image(16, 8)])
    before = [*chat.messages]
    chat.options["logits_processor"] = LogitsProcessorList([Breaks()])
    with pytest.raises(ValueError, match="in the middle"):
        chat.ask("two")
    del chat.options["logits_processor"]
    abandoned = chat.start("three")
    next(abandoned.rounds())
    assert chat.messages == before
    answer = chat.ask("four")
    messages = [*before, {"role": "user", "content": [{"type": "text", "text": "four"}]}]
    fresh = sage.generate(target, None, target.prepare(messages), policy="autoregressive", max_new_tokens=3)
    assert torch.equal(answer.tokens, fresh.tokens)
    assert chat.messages[:-1] == messages
    with refused("chat"):
        chat.finish(abandoned)

"""Losslessness of the decoding loop on tiny random models of both families, with images."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.messages import refused
from support.models import (
    MAKERS,
    OracleSession,
    followed_by,
    greedy_text,
    in_float64,
    make_inputs,
    random_draft,
)
from support.processors import make_processor
from support.toy_helpers import make_policy
from transformers import DynamicCache

import sage
from sage.decoding import generation
from sage.planning.base import Policy

LENGTH = 32


@pytest.fixture
def with_oracle(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the draft session by an OracleSession, so that every kind of round occurs."""

    def install(answer: list[int], seed: int = 0) -> None:
        monkeypatch.setattr(
            generation, "new_session", lambda draft, target, capacity: OracleSession(answer, target.vocab_size, seed)
        )

    return install


def small(name: str) -> Policy:
    """A policy at a size that suits a tiny model."""
    return sage.policy(name, **({"budget": 24, "branch": 6, "steps": 4} if name == "spec_llava" else {}))


# Grouped or plain heads (4 query heads), tied or not; complete trees, trees pruned after drafting, and pruned by cost.
AUDITED = [
    *itertools.product(MAKERS.values(), ((2, False), (4, True)), ["static"]),
    *itertools.product(MAKERS.values(), [(2, False)], ["eagle2", "cost_aware"]),
]
SHAPES = ("autoregressive", "chain", "sage", "cost_aware")  # no tree, paths, trees, and trees that end at an end token


@pytest.mark.slow
@pytest.mark.parametrize(("make", "heads", "policy"), AUDITED)
def test_cache_equals_a_fresh_prefill_after_every_round(make, heads, policy, with_oracle):
    target = make(*heads)
    inputs = in_float64(target, make_inputs(target))
    with_oracle(greedy_text(target, inputs, LENGTH))
    draft = sage.new_draft(target)
    run = generation.start(target, draft, inputs, policy=make_policy(policy, {}), max_new_tokens=LENGTH)
    for _ in run.rounds():
        again = followed_by(target, inputs, torch.tensor(run.tokens[:-1], dtype=torch.long))
        fresh = DynamicCache(config=target.text_config)
        with torch.no_grad():
            target.model(**again, use_cache=True, **{target.cache_argument: fresh})
        length = run.request.cache.length
        assert length == again["input_ids"].shape[1]
        for ours, theirs in zip(run.request.cache.layers, fresh.layers, strict=True):
            torch.testing.assert_close(ours.keys[:, :, :length], theirs.keys, atol=1e-10, rtol=0)
            torch.testing.assert_close(ours.values[:, :, :length], theirs.values, atol=1e-10, rtol=0)
    assert max(run.stats.accepted) > 1


def test_negative_control_cache_that_keeps_the_wrong_rows(tiny_qwen, with_oracle, monkeypatch):
    inputs = in_float64(tiny_qwen, make_inputs(tiny_qwen))
    expected = greedy_text(tiny_qwen, inputs, LENGTH)
    with_oracle(expected)
    monkeypatch.setattr("sage.runtime.cache.TreeCache.keep_path", lambda self, start, path: self.crop_to(start + len(path)))
    out = sage.generate(tiny_qwen, sage.new_draft(tiny_qwen), inputs, policy="static", max_new_tokens=LENGTH)
    assert out.tokens.tolist() != expected


def test_draft_after_commits_equals_one_prefill(tiny_target: sage.Target) -> None:
    """The head's cache, extended round by round, against one prefill over prompt and answer."""
    inputs = in_float64(tiny_target, make_inputs(tiny_target))
    draft = random_draft(tiny_target, seed=1)
    run = generation.start(tiny_target, draft, inputs, policy="static", max_new_tokens=LENGTH)
    for _ in run.rounds():
        pass
    session = run.request.session
    read = len(run.tokens) - 1  # the draft has not read the last round
    prompt = tiny_target.embed(followed_by(tiny_target, inputs, torch.tensor(run.tokens[:read])))
    features = tiny_target.features(prompt)
    with torch.no_grad():
        full = draft(prompt.embeds[:, 1:], features.last[:, :-1], prompt.position_ids[..., :-1])
    known = session.committed
    assert known >= inputs["input_ids"].shape[1]
    torch.testing.assert_close(session.hidden[-1], full[0, known - 1], atol=1e-10, rtol=0)


@pytest.mark.parametrize(("policy", "length"), list(zip(SHAPES, (1, 7, 1, 7), strict=True)))
def test_length_limit_is_exact(policy: str, length: int, tiny_qwen: sage.Target, with_oracle: Callable[..., None]) -> None:
    inputs = make_inputs(tiny_qwen)
    expected = greedy_text(tiny_qwen, inputs, LENGTH)
    with_oracle(expected)
    out = sage.generate(tiny_qwen, sage.new_draft(tiny_qwen), inputs, policy=small(policy), max_new_tokens=length)
    assert out.tokens.tolist() == expected[:length]
    assert out.stats.new_tokens == length


@pytest.mark.parametrize(("policy", "at"), list(zip(SHAPES, (0, 5, 0, 5), strict=True)))
def test_eos_cuts_inside_an_accepted_path(policy, at, tiny_llava, with_oracle):
    inputs = make_inputs(tiny_llava)
    answer = greedy_text(tiny_llava, inputs, LENGTH)
    tiny_llava.eos_token_ids = [answer[at]]
    first = answer.index(answer[at])
    with_oracle(answer)
    out = sage.generate(tiny_llava, sage.new_draft(tiny_llava), inputs, policy=small(policy), max_new_tokens=LENGTH)
    assert out.tokens.tolist() == answer[: first + 1]


@pytest.mark.parametrize(("length", "eos_at"), [(1, None), (3, 0), (3, None), (LENGTH, 5)])
def test_drafted_marks_the_drafted_tokens_of_each_round(length, eos_at, tiny_llava, with_oracle):
    inputs = make_inputs(tiny_llava)
    answer = greedy_text(tiny_llava, inputs, LENGTH)
    tiny_llava.eos_token_ids = [] if eos_at is None else [answer[eos_at]]
    with_oracle(answer)
    run = generation.start(tiny_llava, sage.new_draft(tiny_llava), inputs, policy="sage", max_new_tokens=length)
    assert run.output().drafted.tolist() == []
    marks: list[bool] = []
    for emitted in run.rounds():
        marks += [place < emitted.num_drafted for place in range(len(emitted.tokens))]
        assert run.output().drafted.tolist() == marks
    assert len(marks) == len(run.output().tokens)


@pytest.mark.parametrize("length", [1, 9, LENGTH])
def test_stream_yields_the_complete_text(length: int, tiny_qwen: sage.Target, with_oracle: Callable[..., None]) -> None:
    """Bytes that are no text; the pieces themselves are those of tests/cli/test_output.py."""
    inputs, draft = make_inputs(tiny_qwen), sage.new_draft(tiny_qwen)
    with_oracle(greedy_text(tiny_qwen, inputs, LENGTH))
    tiny_qwen.processor = make_processor(tiny_qwen)
    text = sage.generate(tiny_qwen, draft, inputs, policy="chain", max_new_tokens=length).text
    assert text and "".join(sage.stream(tiny_qwen, draft, inputs, policy="chain", max_new_tokens=length)) == text


def test_counts_are_consistent(tiny_qwen: sage.Target, with_oracle: Callable[..., None]) -> None:
    inputs = make_inputs(tiny_qwen)
    with_oracle(greedy_text(tiny_qwen, inputs, LENGTH))
    stats = sage.generate(tiny_qwen, sage.new_draft(tiny_qwen), inputs, policy="sage", max_new_tokens=LENGTH).stats
    assert stats.target_passes == stats.rounds == len(stats.accepted) == len(stats.rounds_log)
    assert stats.new_tokens == LENGTH
    assert stats.tokens_per_target_pass == pytest.approx((LENGTH - 1) / stats.rounds)
    assert stats.mean_accepted_draft == pytest.approx(sum(stats.accepted) / stats.rounds)
    assert all(entry["accepted"] <= entry["depth"] for entry in stats.rounds_log)
    assert stats.total_s == pytest.approx(sum(stats.time_s.values()))
    assert stats.decode_s < stats.total_s


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str, tiny_target: sage.Target) -> None:
    inputs = in_float64(tiny_target, make_inputs(tiny_target))
    draft = random_draft(tiny_target, seed=0)
    expected = greedy_text(tiny_target, inputs, 12)
    padding = (5, 0) if side == "left" else (0, 5)
    ids = inputs["input_ids"]
    padded = {
        key: torch.nn.functional.pad(value, padding) if value.shape == ids.shape else value for key, value in inputs.items()
    }
    padded["attention_mask"] = torch.nn.functional.pad(torch.ones_like(ids), padding)
    for policy in ("autoregressive", "sage"):
        out = sage.generate(tiny_target, draft, padded, policy=policy, max_new_tokens=12)
        assert out.tokens.tolist() == expected
        assert out.stats.prompt_tokens == ids.shape[1]
    with refused("inputs", "attention mask"):
        sage.generate(tiny_target, draft, {**inputs, "attention_mask": torch.zeros_like(ids)}, max_new_tokens=12)


class TestRefusals:
    def test_requests_that_cannot_be_decoded(self, tiny_qwen: sage.Target) -> None:
        inputs, two = make_inputs(tiny_qwen), {"input_ids": torch.randint(2, 60, (2, 5))}
        with refused("draft", "chain"):
            sage.generate(tiny_qwen, None, inputs, policy="chain")
        with refused("max_new_tokens", "600", "512", "496"):
            sage.generate(tiny_qwen, None, inputs, policy="autoregressive", max_new_tokens=600)
        with refused("inputs", "2"):
            sage.generate(tiny_qwen, None, two, policy="autoregressive")
        with refused("stream", "processor"):
            next(sage.stream(tiny_qwen, None, inputs, policy="autoregressive"))

    @pytest.mark.parametrize("policy", ["chain", "eagle2", "cost_aware"])
    def test_nan_deep_in_the_draft_names_its_pass(self, policy, tiny_qwen, with_oracle):
        """Only passes below the first level give NaN, as overflow in float16 can."""
        inputs = make_inputs(tiny_qwen)
        with_oracle(greedy_text(tiny_qwen, inputs, LENGTH))
        run = generation.start(tiny_qwen, sage.new_draft(tiny_qwen), inputs, make_policy(policy, {}), max_new_tokens=LENGTH)
        session: Any = run.request.session
        expand, session.expand_pass = session.expand_pass, lambda rows, tokens: expand(rows, tokens) * float("nan")
        with refused("draft", "level", "NaN"):
            list(run.rounds())

    def test_nan_in_the_target_names_its_pass(self, tiny_qwen: sage.Target) -> None:
        tiny_qwen.model.lm_head.weight.data[3] = float("nan")
        with refused("prefill of 16 tokens", "NaN"):
            sage.generate(tiny_qwen, None, make_inputs(tiny_qwen), policy="autoregressive")

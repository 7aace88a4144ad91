"""Sampling: greedy, seeded draws, logits processors on the prefix of each node, and stopping rules."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.messages import refused
from support.models import make_inputs, make_qwen
from support.processors import make_processor
from support.toy_helpers import tree_of
from transformers import LogitsProcessor, LogitsProcessorList

import sage
from sage.decoding.answer import StopCriterion
from sage.decoding.settings import Sampling
from sage.decoding.verify import TargetSampler, Verifier

LENGTH = 28
PROMPT = torch.tensor([3, 0])


def sampler(**options: Any) -> TargetSampler:
    return TargetSampler(Sampling(**options), PROMPT)


def test_nodes_of_one_depth_share_their_noise() -> None:
    tree = tree_of([(1,), (2,), (1, 3)])
    logits = torch.randn(1, 50).expand(4, -1)
    chosen = sampler(temperature=1.0, seed=3)(logits, tree)
    assert chosen[1] == chosen[2]
    later = sampler(temperature=1.0, seed=3)
    later.extend([9])
    assert torch.equal(later(logits[:1], tree_of([])), chosen[1:2])


@pytest.mark.slow
def test_draws_follow_p() -> None:
    """4,000 keyed draws; the standard error of a share is below .008, so .035 is four of them."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = [int(sampler(temperature=1.0, seed=seed)(p.log()[None], tree_of([]))) for seed in range(4_000)]
    torch.testing.assert_close(torch.tensor(draws).bincount(minlength=4) / 4_000, p, atol=0.035, rtol=0)


def test_labels_are_matches_or_target_probabilities() -> None:
    tree = tree_of([(1,)])
    tree.note_candidates(torch.tensor([0]), torch.tensor([[0.5, 0.2]]), torch.tensor([[1, 2]]))
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    greedy = sampler()
    greedy_labels = Verifier(greedy).verify(logits, tree, needs_labels=True).labels
    assert greedy_labels(2) == [[1.0, 0.0]] and greedy_labels(1) == [[1.0]], "of the only expanded node"
    assert Verifier(greedy).verify(logits, tree).labels(2) == []
    sampled = sampler(temperature=1.0, couple=False)
    sampled_labels = Verifier(sampled).verify(logits, tree, needs_labels=True).labels
    sampled(logits + torch.randn(2, 3), tree)  # labels stay valid in later rounds
    torch.testing.assert_close(torch.tensor(sampled_labels(2)), logits.softmax(-1)[:1, 1:])
    assert sampled_labels(1) == [row[:1] for row in sampled_labels(2)]


def test_labels_of_coupled_candidates_are_the_draw_itself() -> None:
    tree = tree_of([(1,)])
    tree.note_candidates(torch.tensor([0]), torch.tensor([[0.4, 0.3, 0.1]]), torch.tensor([[1, 2, 0]]))
    logits = torch.randn(2, 3)
    draw = int(sampler(temperature=1.0, seed=2)(logits, tree)[0])
    labels = Verifier(sampler(temperature=1.0, seed=2)).verify(logits, tree, needs_labels=True).labels
    assert labels(3) == [[float(token == draw) for token in (1, 2, 0)]]


class PrefixPenalty(LogitsProcessor):
    """Forbids the token that is the sum of the prefix modulo the vocabulary, so that a wrong prefix changes the result."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[torch.arange(len(scores)), input_ids.sum(1) % scores.shape[1]] = -torch.inf
        return scores


def test_processors_see_each_nodes_own_prefix() -> None:
    """Against a slow reference that walks every path."""
    tree = tree_of([(1,), (2,), (1, 3), (2, 2), (1, 3, 0)])
    logits = torch.randn(20, 6, 11, generator=torch.Generator().manual_seed(0))  # a wrong prefix seldom changes one argmax
    ours = sampler(logits_processor=LogitsProcessorList([PrefixPenalty()]))
    ours.extend([5, 0])
    found = torch.stack([ours(one.clone(), tree) for one in logits])
    for node in range(6):
        path, at = [], node
        while at >= 0:
            path.insert(0, int(tree.tokens[at]))
            at = int(tree.parents[at])
        prefix = torch.tensor([[*PROMPT.tolist(), 5, *path]])
        assert found[:, node].tolist() == [int(PrefixPenalty()(prefix, one[[node]]).argmax()) for one in logits]


@pytest.mark.slow
def test_bad_words_are_never_generated_and_stop_strings_end_the_answer() -> None:
    target = make_qwen()
    target = sage.Target(target.model, make_processor(target))
    inputs = make_inputs(target)
    options = {"max_new_tokens": 200}
    free = sage.generate(target, None, inputs, policy="autoregressive", **options)
    decode = target.processor.tokenizer.decode
    token = next(t for t in free.tokens.tolist() if decode([t]).isascii() and decode([t]).isalnum())
    word = decode([token])
    clean = sage.generate(target, None, inputs, policy="autoregressive", bad_words=[word], **options)
    assert token not in clean.tokens.tolist()
    stopped = sage.generate(target, sage.new_draft(target), inputs, policy="static", stop=[word], **options)
    expected = free.tokens.tolist()[: free.tokens.tolist().index(token) + 1]
    assert stopped.tokens.tolist() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, ("temperature", "-1.0")),
        ({"couple": False}, ("couple", "False", "greedy")),
        ({"top_k": -2}, ("top_k", "-2")),
        ({"top_p": 0.0}, ("top_p", "0.0")),
        ({"repetition_penalty": 0.0}, ("repetition_penalty", "0.0")),
        ({"max_new_tokens": 0}, ("max_new_tokens", "0")),
        ({"stop": [""]}, ("stop", "empty")),
        ({"stop": [5]}, ("stop", "[5]")),
        ({"bad_words": 5}, ("bad_words", "5")),
        ({"logits_processor": 5}, ("logits_processor", "5")),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: tuple[str, ...]) -> None:
    with refused(*message):
        Sampling(**options)


def test_unknown_option_is_named(tiny_qwen: sage.Target) -> None:
    with refused("temprature", "policy", "max_new_tokens"):
        sage.generate(tiny_qwen, None, make_inputs(tiny_qwen), policy="autoregressive", temprature=1.0)


def test_bad_words_and_stop_strings_need_a_tokenizer(tiny_qwen: sage.Target) -> None:
    for options in ({"bad_words": ["a"]}, {"stop": ["a"]}):
        with refused(*options, "tokenizer"):
            sage.generate(tiny_qwen, None, make_inputs(tiny_qwen), policy="autoregressive", **options)


class Letters:
    """A tokenizer with one letter per token."""

    def decode(self, tokens: Sequence[int], **options: Any) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def one_by_one(tokens: Sequence[int], most: int, eos: Collection[int], stop: Sequence[str]) -> tuple[list[int], bool]:
    """The answer, and whether it has ended."""
    kept: list[int] = []
    for token in tokens[:most]:
        kept.append(token)
        if token in eos or any(word in Letters().decode(kept) for word in stop):
            return kept, True
    return kept, len(kept) == most


@given(
    rounds=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=6),
    most=st.integers(1, 12),
    eos=st.frozensets(st.integers(0, 5), max_size=2),
    stop=st.lists(st.text("abcdef", min_size=1, max_size=3), max_size=2),
)
def test_stop_criterion_equals_checking_token_by_token(rounds, most, eos, stop):
    answer = StopCriterion(Sampling(max_new_tokens=most, stop=stop), eos, Letters())
    given_tokens: list[int] = []
    for tokens in rounds:
        before = len(answer.tokens)
        given_tokens += tokens
        kept = answer.append(tokens)
        assert answer.tokens[before:] == kept
        assert (answer.tokens, answer.is_over) == one_by_one(given_tokens, most, eos, stop)
        if answer.is_over:
            return

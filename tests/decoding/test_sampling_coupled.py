"""Drafts that propose with the noise of the target's draws: exact output distribution, and what the draft gains from it."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from support.toy_helpers import (
    PROMPT,
    SMALL,
    VOCABULARY,
    Context,
    Distribution,
    NextTokenProbs,
    TableSession,
    distance,
    draft_probs,
    make_policy,
    processed_by,
    sequences,
    target_probs,
    toy_answer,
    toy_request,
    tree_of,
)
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from sage.decoding.answer import Stats
from sage.decoding.decoder import decode
from sage.decoding.settings import Sampling
from sage.decoding.verify import TargetSampler, Verdict, Verifier
from sage.planning.tree import Tree

LENGTH = 4
POLICIES = {name: options for name, options in SMALL}  # one form of each
every_policy = pytest.mark.parametrize(("name", "options"), POLICIES.items(), ids=POLICIES)


COUPLED = Sampling(temperature=1.0)
PROCESSED = Sampling(temperature=1.5, top_p=0.97, repetition_penalty=1.6)
processed_probs = processed_by((RepetitionPenaltyLogitsProcessor(1.6), TemperatureLogitsWarper(1.5), TopPLogitsWarper(0.97)))


# -- enumeration ---------------------------------------------------------------------------------------------------------------


class GivenNoise:
    """Rows of noise in the place of `PositionNoise`."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __call__(self, first: int, count: int) -> torch.Tensor:
        missing = max(first + count - len(self.rows), 0)  # beyond the answer's end: draws that are never emitted
        return torch.cat((self.rows, torch.zeros(missing, VOCABULARY, dtype=torch.float64)))[first : first + count]


def noise_given_draw(probs: torch.Tensor, draw: int, generator: torch.Generator) -> torch.Tensor:
    """Gumbel noise [V] given that argmax(log p + g) = draw: a race whose first arrival is T ~ Exp(1), others T + E / p."""
    first, *others = torch.empty(1 + VOCABULARY, dtype=torch.float64).exponential_(generator=generator)
    arrivals = first + torch.stack(others) / probs
    arrivals[draw] = first
    free = torch.empty(VOCABULARY, dtype=torch.float64).exponential_(generator=generator)  # of tokens that are filtered out
    return torch.where(probs > 0, -arrivals.log() - probs.log(), -free.log())


def coupled_distribution(
    name: str, options: dict[str, Any], sampling: Sampling = COUPLED, probs: NextTokenProbs = target_probs
) -> tuple[Distribution, list[Stats]]:
    """Distribution of answers of four tokens, decoded by the real loop with one noise per possible sequence of draws.

    A sequence of draws has the probability of its tokens. Given the draws, the noise of every position is drawn from its
    conditional distribution, and draft and target both use it: trees depend on it in every way that the code allows.
    """
    found: Distribution = Counter()
    runs = []
    for number, draws in enumerate(itertools.product(range(VOCABULARY), repeat=LENGTH)):
        contexts = [probs(draws[:position]) for position in range(LENGTH)]
        weight = float(torch.stack([context[draw] for context, draw in zip(contexts, draws, strict=True)]).prod())
        if weight == 0:
            continue
        generator = torch.Generator().manual_seed(number)
        rows = [noise_given_draw(context, draw, generator) for context, draw in zip(contexts, draws, strict=True)]
        request = toy_request(make_policy(name, options), {}, LENGTH, [])
        sampler = TargetSampler(sampling, torch.tensor(PROMPT))
        sampler._noise = GivenNoise(torch.stack(rows))  # type: ignore[assignment]
        request.verifier = Verifier(sampler)
        tokens = [token for round_ in decode(request) for token in round_.tokens]
        found[tuple(tokens)] += weight
        runs.append(request.stats)
    return found, runs


@pytest.mark.slow
@every_policy
def test_distribution_with_coupled_trees_without_and_with_logits_processors(name: str, options: dict[str, Any]) -> None:
    found, runs = coupled_distribution(name, options)
    assert distance(found, sequences(LENGTH)) < 1e-12
    assert name == "autoregressive" or sum(sum(stats.accepted) for stats in runs) > len(runs) / 2
    processed, _ = coupled_distribution(name, options, PROCESSED, processed_probs)
    expected = {tokens: p for tokens, p in sequences(LENGTH, None, processed_probs).items() if p > 0}
    assert distance(processed, expected) < 1e-12
    assert distance(processed, found) > 0.02, "the processors have an effect"


def verified_by_ratio(self: Verifier, logits: torch.Tensor, tree: Tree, *options: Any) -> Verdict:
    """Rejection sampling of a chain with everything from the shared noise: u < p / q, else the residual's argmax with g."""
    sampler: Any = self.sampler
    sampler(logits, tree)
    context: Context = tuple(sampler.emitted)
    path, tokens = [0], []
    for node in range(len(tree)):
        noise = sampler._noise(sampler.num_new + node, 1)[0]
        p, q = logits[node].softmax(0), draft_probs(context)
        drafted = int(tree.tokens[node + 1]) if node + 1 < len(tree) else None
        if drafted is None:
            tokens.append(int((p.log() + noise).argmax()))
            break
        if float((-(-noise[drafted]).exp()).exp()) >= float(p[drafted] / q[drafted]):
            tokens.append(int(((p - q).clamp(min=0).log() + noise).argmax()))
            break
        path, tokens, context = [*path, node + 1], [*tokens, drafted], (*context, drafted)
    return Verdict(path, tokens)


@pytest.mark.slow
def test_negative_control_rejection_sampling_with_shared_noise_fails_the_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same enumeration, with the other rule of acceptance: far from the target's distribution."""

    def extend(self: TargetSampler, tokens: list[int], keep: Any = TargetSampler.extend) -> None:
        keep(self, tokens)
        self.emitted = [*getattr(self, "emitted", []), *tokens]  # type: ignore[attr-defined]

    monkeypatch.setattr(TargetSampler, "extend", extend)
    assert distance(coupled_distribution("chain", {"depth": 2})[0], sequences(LENGTH)) < 1e-12
    monkeypatch.setattr(Verifier, "verify", verified_by_ratio)
    found, _ = coupled_distribution("chain", {"depth": 2})
    assert distance(found, sequences(LENGTH)) > 0.02


# -- what the draft proposes ---------------------------------------------------------------------------------------------------


def sampler_after(num_new: int, **options: Any) -> TargetSampler:
    """A sampler that has drawn the first token."""
    sampler = TargetSampler(Sampling(temperature=0.8, seed=4, **options), torch.tensor([3, 0]))
    sampler.first(torch.randn(1, 50))
    sampler.extend([1] * num_new)
    return sampler


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}])
def test_a_draft_with_the_targets_logits_proposes_the_targets_draws(options: dict[str, Any]) -> None:
    tree = tree_of([(1,), (1, 3), (1, 3, 2)])
    logits = torch.randn(4, 50) * 2
    sampler = sampler_after(3, **options)
    draws = sampler(logits, tree)
    for level in range(1, 5):
        scores = sampler.coupled(logits[level - 1 : level], level)
        assert scores.argmax(-1) == draws[level - 1]
    assert not torch.equal(sampler.coupled(logits[:1], 1), sampler.coupled(logits[:1], 2)), "noise by position"


def test_a_reduced_draft_vocabulary_gets_the_noise_of_target_ids() -> None:
    sampler, token_map = sampler_after(1), torch.tensor([40, 3, 7, 21])
    logits = torch.randn(2, 50)
    found = sampler.coupled(logits[:, token_map], 2, token_map)
    torch.testing.assert_close(found, sampler.coupled(logits, 2)[:, token_map])


def test_greedy_and_uncoupled_drafts_are_left_alone() -> None:
    logits = torch.randn(2, 50)
    for sampling in (Sampling(), Sampling(temperature=1.0, couple=False)):
        assert TargetSampler(sampling, torch.tensor([3])).coupled(logits, 1) is logits


def test_a_perfect_draft_is_always_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.toy_helpers.draft_probs", target_probs)
    for couple in (True, False):
        accepted = rounds = 0
        for seed in range(20):
            sampling = Sampling(temperature=1.0, couple=couple, seed=seed, max_new_tokens=13)
            stats = toy_answer(make_policy("chain", {"depth": 3}), sampling, TableSession(target_probs)).stats
            accepted, rounds = accepted + sum(stats.accepted), rounds + len(stats.accepted)
        assert (accepted == 3 * rounds) == couple

"""Losslessness as a law of probability, enumerated in float64 for every policy, and as equality of texts on tiny models."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.models import OracleSession, in_float64, make_inputs, make_llava, make_qwen
from support.slow_trees import SlowTree
from support.toy_helpers import (
    EOS,
    PLAIN,
    PROMPT,
    UNDECIDED,
    VOCABULARY,
    Context,
    Law,
    distance,
    make_policy,
    probability,
    sequences,
    target_law,
    toy_request,
    toy_tree,
)
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

import sage
from sage import generation
from sage.decoder import decode, draft_tree
from sage.sampling import Sampling
from sage.stats import Stats
from sage.trees import Tree
from sage.trees.eagle2 import Eagle2
from sage.verify import accept

# At most seven nodes a round, so that all draws can be enumerated; every kind of pruning occurs.
SMALL: list[tuple[str, dict[str, Any]]] = [
    ("autoregressive", {}),
    ("chain", {"depth": 3}),
    ("static", {"paths": [(0,), (2,), (0, 0), (0, 1), (0, 1, 0)]}),
    ("eagle2", {"total": 6, "depth": 3, "top_k": 2}),
    ("eagle2", {"total": 3, "depth": 2, "top_k": 4}),
    ("spec_llava", {"budget": 4, "branch": 3, "steps": 2}),
    ("spec_llava", {"budget": 4, "branch": 2, "steps": 2, "min_confidence": 0.15, "follow_kept": True}),
    ("talon", {"total": 6, "top_k": 3, "ratio": 0.4}),
    ("ddd", {"total": 6, "depth": 3, "top_k": 2, "threshold": 0.7, "check_every": 1}),
    ("sage", {"top_k": 4, "max_nodes": 5, "alpha_from": "current"}),
    ("cost_aware", {"max_depth": 3, "max_nodes": 5, "max_width": 3, "top_k": 3}),
]
# As the policies come, as far as four tokens allow; trees of 25 nodes and more.
LARGE: list[tuple[str, dict[str, Any]]] = [
    ("static", {}),
    ("eagle2", {"total": 40, "depth": 3, "top_k": 4}),
    ("spec_llava", {"budget": 4, "branch": 4, "steps": 3, "follow_kept": True}),
    ("talon", {"top_k": 4}),
    ("ddd", {"total": 30, "depth": 3, "top_k": 4, "threshold": 0.5, "check_every": 1}),
    ("sage", {"top_k": 4}),
    ("cost_aware", {"max_depth": 3, "top_k": 4}),
]


def name_of(value: Any) -> str:
    """A readable test id."""
    return value if isinstance(value, str) else "-".join(f"{key}={option}" for key, option in value.items())


every_policy = pytest.mark.parametrize(("name", "options"), SMALL, ids=name_of)


def test_every_policy_is_enumerated() -> None:
    assert {name for name, _ in SMALL} == set(sage.POLICIES)
    assert {name for name, _ in LARGE} == set(sage.POLICIES) - {"autoregressive", "chain"}


# -- one round, all draws ----------------------------------------------------------------------------------------------------


def total_variation(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().sum() / 2)


Rule = Callable[[Tree, Sequence[int]], tuple[list[int], list[int]]]


def round_law(tree: Tree, contexts: list[Context], rule: Rule = accept, length: int = 4) -> Law:
    """The exact law of the next `length` tokens: all V^N draws of one round, fresh draws for what it leaves open."""
    emitted_law: Law = Counter()
    weights = [target_law(context).tolist() for context in contexts]
    for draws in itertools.product(range(VOCABULARY), repeat=len(tree)):
        weight = 1.0
        for node, draw in enumerate(draws):
            weight *= weights[node][draw]
        _, emitted = rule(tree, draws)
        emitted_law[tuple(emitted[:length])] += weight
    return continued(emitted_law, contexts[0], length)


def continued(law: Law, root: Context, length: int) -> Law:
    """Every shorter sequence goes on with fresh draws from the target."""
    full: Law = Counter()
    for emitted, weight in law.items():
        for rest in itertools.product(range(VOCABULARY), repeat=length - len(emitted)):
            full[emitted + rest] += weight * probability((*root, *emitted, *rest)) / probability((*root, *emitted))
    return full


def law_below(root: Context, length: int = 4) -> Law:
    """The target's law of `length` tokens after `root`."""
    draws = itertools.product(range(VOCABULARY), repeat=length)
    return {tokens: probability((*root, *tokens)) / probability(root) for tokens in draws}


@every_policy
def test_law_of_one_round(name: str, options: dict[str, Any]) -> None:
    tree, contexts = toy_tree(make_policy(name, options))
    assert len(tree) <= 7 and (len(tree) > 1 or name == "autoregressive") and tree.depth <= 3
    assert distance(round_law(tree, contexts), law_below((0,))) < 1e-12


@pytest.mark.parametrize(("name", "options"), [case for case in SMALL if case[0] in ("eagle2", "spec_llava")], ids=name_of)
def test_the_enumerated_trees_are_pruned(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The laws above would say nothing about pruning if `select` kept everything."""
    policy, drafted = make_policy(name, options), []
    select = policy.select
    monkeypatch.setattr(policy, "select", lambda tree: (drafted.append(len(tree)), select(tree))[1])
    tree, _ = toy_tree(policy)
    assert len(tree) < drafted[0]


def test_negative_control_a_policy_that_peeks_at_the_draws() -> None:
    """A tree that keeps its only child just when the draw below it is token 1: the text then says 1 too often."""

    class Peeking(Eagle2):
        def select(self, tree: Tree) -> torch.Tensor:
            return torch.arange(2 if self.draws[1] == 1 else 1)

    def rule(tree: Tree, draws: Sequence[int]) -> tuple[list[int], list[int]]:
        policy.draws = draws
        keep = policy.select(tree)
        return accept(SlowTree.copy_of(tree).subtree(keep), draws[: len(keep)])

    policy = Peeking(total=2, depth=1, top_k=1)
    policy.draws = [0, 1]
    tree, contexts = toy_tree(policy)
    assert len(tree) == 2
    assert distance(round_law(tree, contexts, length=2), law_below((0,), 2)) < 1e-12
    assert distance(round_law(tree, contexts, rule, length=2), law_below((0,), 2)) > 0.02


def test_negative_control_a_rule_that_descends_unasked() -> None:
    def eager(tree: Tree, draws: Sequence[int]) -> tuple[list[int], list[int]]:
        return [0, 1], [int(tree.tokens[1]), draws[1]]

    tree, contexts = toy_tree(sage.policy("chain", depth=1))
    assert distance(round_law(tree, contexts, eager, length=2), law_below((0,), 2)) > 0.05


# -- the biased rule of the literature ----------------------------------------------------------------------------------------


def checked_by_ratio(candidate_law: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The law of a token when one candidate, of the law given, passes with min(1, p / q), else norm((p - q)+) is drawn."""
    passed = candidate_law * (p / q).clamp(max=1)
    residual = (p - q).clamp(min=0)
    return passed + (1 - passed.sum()) * residual / residual.sum()


# The draft overrates its first guess and is right about the rest: p / q = .105 / .5 = .21.
P_SIX = torch.tensor([0.105, *[0.179] * 5], dtype=torch.float64)
Q_SIX = torch.tensor([0.5, *[0.1] * 5], dtype=torch.float64)


def test_negative_control_min_of_one_and_p_over_q_is_biased_for_a_tree_of_top_candidates() -> None:
    """The top candidate passes with .21, twice its probability: law (.21, .158 x 5), a total variation of .105."""
    request = toy_request(Eagle2(total=2, depth=1, top_k=1), {}, 2, [])
    request.root, request.draft_logits = 0, Q_SIX.log()[None]
    tree = draft_tree(request)
    assert tree.tokens.tolist() == [0, 0]
    top_candidate = torch.nn.functional.one_hot(tree.tokens[1], 6).double()
    biased = checked_by_ratio(top_candidate, P_SIX, Q_SIX)
    torch.testing.assert_close(biased, torch.tensor([0.21, *[0.158] * 5], dtype=torch.float64))
    assert total_variation(biased, P_SIX) == pytest.approx(0.105, abs=1e-12)
    # The same rule is exact where it belongs: for a candidate drawn from q.
    assert total_variation(checked_by_ratio(Q_SIX, P_SIX, Q_SIX), P_SIX) < 1e-12
    # Ours on the same tree, by enumeration of the root's draw.
    ours = torch.zeros(6, dtype=torch.float64)
    for draw in range(6):
        _, emitted = accept(tree, [draw, 0])
        ours[emitted[0]] += P_SIX[draw]
    assert total_variation(ours, P_SIX) < 1e-12


# -- the whole loop, round after round -----------------------------------------------------------------------------------------


def loop_law(name: str, options: dict[str, Any], eos: list[int], sampling: Sampling = PLAIN) -> tuple[Law, list[Stats]]:
    """The exact law of a whole answer of four tokens through the real `decode`.

    Draws are fixed one by one, where the answer stops for want of one; so all branches of all rounds are walked, with
    what the policy learned on the way.
    """
    law: Law = Counter()
    runs: list[Stats] = []

    def explore(fixed: dict[Context, int], weight: float) -> None:
        request = toy_request(make_policy(name, options), fixed, 4, eos, sampling)
        tokens: Context = ()
        for round_ in decode(request):
            tokens += tuple(round_.tokens)
            if UNDECIDED in tokens:
                break
        if UNDECIDED not in tokens:
            law[tokens] += weight
            runs.append(request.stats)
            return
        context = tokens[: tokens.index(UNDECIDED)]
        assert context not in fixed, "a token was taken from another context's draw"
        for draw, p in enumerate(request.verifier.sampler.laws[context].tolist()):  # type: ignore[attr-defined]
            if p > 0:
                explore({**fixed, context: draw}, weight * p)

    explore({}, 1.0)
    return law, runs


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), SMALL + LARGE, ids=name_of)
def test_law_of_the_whole_loop(name: str, options: dict[str, Any]) -> None:
    law, runs = loop_law(name, options, [EOS])
    assert distance(law, sequences(4, EOS)) < 1e-12
    assert name == "autoregressive" or sum(sum(stats.accepted) for stats in runs) > len(runs) / 2


PROCESSED = Sampling(temperature=1.5, top_p=0.97, repetition_penalty=1.6, min_new_tokens=2)


def processed_law(context: Context) -> torch.Tensor:
    """p(next | context) after Hugging Face's processors, one context at a time."""
    prefix = torch.tensor([[*PROMPT, *context]])
    scores = target_law(context).log()[None]
    for processor in (
        RepetitionPenaltyLogitsProcessor(1.6),
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 2, [EOS]),
        TemperatureLogitsWarper(1.5),
        TopPLogitsWarper(0.97),
    ):
        scores = processor(prefix, scores)
    return scores[0].softmax(0)


@pytest.mark.slow
@every_policy
def test_law_of_the_whole_loop_where_each_node_has_its_own_processed_law(name: str, options: dict[str, Any]) -> None:
    """The repetition penalty and the earliest EOS depend on the path, so siblings' subtrees are processed differently."""
    law, _ = loop_law(name, options, [EOS], PROCESSED)
    expected = {tokens: p for tokens, p in sequences(4, EOS, processed_law).items() if p > 0}
    assert distance(law, expected) < 1e-12
    assert len(law) > 30  # filters leave enough to tell laws apart
    assert distance(law, sequences(4, EOS)) > 0.02  # the processing is not idle


def test_negative_control_the_loop_notices_a_biased_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emitting the first child instead of the root's draw: the law of the second token is the draft's favourite."""

    def eager(tree: Tree, choices: Sequence[int]) -> tuple[list[int], list[int]]:
        if len(tree) == 1 or choices[0] == UNDECIDED:
            return accept(tree, choices)
        return [0, 1], [int(tree.tokens[1]), choices[1]]

    monkeypatch.setattr("sage.verify.accept", eager)
    law, _ = loop_law("chain", {"depth": 1}, [])
    assert distance(law, sequences(4)) > 0.02


# -- texts of tiny models ------------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[..., sage.Target]] = {"qwen2_5_vl": make_qwen, "llava_onevision": make_llava}
LENGTH = 16
# Small budgets where the defaults would only cost time; the others as they come.
ON_MODELS = {name: {} for name in sage.POLICIES if name != "autoregressive"} | {
    "spec_llava": {"budget": 24, "branch": 6, "steps": 4},
    "eagle2": {"total": 24, "depth": 6, "top_k": 5},
}


@pytest.fixture(scope="module", params=list(itertools.product(MAKERS, (2, 4), (False, True))), ids=str)
def model(request: pytest.FixtureRequest) -> tuple[sage.Target, Any, dict[str, torch.Tensor]]:
    """A target of either family with grouped or plain heads (4 query heads), tied or not, its draft and a prompt; float64."""
    family, kv_heads, tied = request.param
    target = MAKERS[family](kv_heads=kv_heads, tied=tied)
    inputs = in_float64(target, make_inputs(target, seed=kv_heads))
    return target, sage.new_draft(target, seed=0).double(), inputs


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_policy_gives_the_targets_own_text(
    temperature: float, model: tuple[sage.Target, Any, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy: Hugging Face's text. Sampled: the text that the same seed gives without speculation."""
    target, draft, inputs = model
    options = {"max_new_tokens": LENGTH, "temperature": temperature, "seed": 5}
    alone = sage.generate(target, None, inputs, policy="autoregressive", **options).tokens.tolist()
    if temperature == 0:
        ids = target.model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False)
        assert ids[0, inputs["input_ids"].shape[1] :].tolist() == alone

    def oracle(*args: Any, **kwargs: Any) -> OracleSession:
        return OracleSession(alone, target.vocab_size, seed=1)

    monkeypatch.setattr(generation, "new_session", oracle)
    for name, policy_options in ON_MODELS.items():
        out = sage.generate(target, draft, inputs, policy=make_policy(name, policy_options), **options)
        assert out.tokens.tolist() == alone, name
        assert sum(out.stats.accepted) >= len(alone) // 4, name


def test_negative_control_another_seed_is_another_text(model: tuple[sage.Target, Any, dict[str, torch.Tensor]]) -> None:
    target, _, inputs = model
    texts = {
        tuple(
            sage.generate(
                target, None, inputs, policy="autoregressive", max_new_tokens=LENGTH, temperature=0.8, seed=seed
            ).tokens.tolist()
        )
        for seed in (5, 6)
    }
    assert len(texts) == 2

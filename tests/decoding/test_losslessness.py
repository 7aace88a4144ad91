"""Losslessness: equality of output distributions, enumerated in float64, and equality of texts on tiny random models.

Single rounds of any tree are enumerated in test_tree_properties.py.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.models import MAKERS, OracleSession, greedy_text, in_float64, make_inputs
from support.toy_helpers import (
    EOS,
    PLAIN,
    PROMPT,
    SMALL,
    UNDECIDED,
    Context,
    Distribution,
    distance,
    make_policy,
    name_of,
    processed_by,
    sequences,
    toy_request,
)
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

import sage
from sage.decoding import generation
from sage.decoding.answer import Stats
from sage.decoding.decoder import decode
from sage.decoding.settings import Sampling
from sage.decoding.verify import accept
from sage.planning.tree import Tree

# Default options, limited to four tokens; trees of 25 nodes and more.
LARGE: list[tuple[str, dict[str, Any]]] = [
    ("static", {}),
    ("eagle2", {"total": 40, "depth": 3, "top_k": 4}),
    ("spec_llava", {"budget": 4, "branch": 4, "steps": 3}),
    ("talon", {"top_k": 4}),
    ("ddd", {"total": 30, "depth": 3, "top_k": 4, "threshold": 0.5, "check_every": 1}),
    ("sage", {"top_k": 4}),
    ("cost_aware", {"max_depth": 3, "top_k": 4}),
]


every_policy = pytest.mark.parametrize(("name", "options"), SMALL, ids=name_of)


def test_every_policy_is_enumerated() -> None:
    assert {name for name, _ in SMALL} == set(sage.POLICIES)
    assert {name for name, _ in LARGE} == set(sage.POLICIES) - {"autoregressive", "chain"}


# -- the complete loop, round after round --------------------------------------------------------------------------------------


def loop_distribution(
    name: str, options: dict[str, Any], eos: list[int], sampling: Sampling = PLAIN
) -> tuple[Distribution, list[Stats]]:
    """Exact distribution of an answer of four tokens, decoded with `sage.decoding.decoder.decode`.

    Draws are fixed one by one, each where an answer stops for lack of a draw. This visits all branches of all rounds, with the
    state that the policy has learned on the way.
    """
    found: Distribution = Counter()
    runs: list[Stats] = []

    def explore(fixed: dict[Context, int], weight: float) -> None:
        request = toy_request(make_policy(name, options), fixed, 4, eos, sampling)
        tokens: Context = ()
        for round_ in decode(request):
            tokens += tuple(round_.tokens)
            if UNDECIDED in tokens:
                break
        if UNDECIDED not in tokens:
            found[tokens] += weight
            runs.append(request.stats)
            return
        context = tokens[: tokens.index(UNDECIDED)]
        assert context not in fixed, "a token was taken from another context's draw"
        for draw, p in enumerate(request.verifier.sampler.probs[context].tolist()):  # type: ignore[attr-defined]
            if p > 0:
                explore({**fixed, context: draw}, weight * p)

    explore({}, 1.0)
    return found, runs


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), SMALL + LARGE, ids=name_of)
def test_distribution_of_the_loop(name: str, options: dict[str, Any]) -> None:
    found, runs = loop_distribution(name, options, [EOS])
    assert distance(found, sequences(4, EOS)) < 1e-12
    assert name == "autoregressive" or sum(sum(stats.accepted) for stats in runs) > len(runs) / 2


PROCESSED = Sampling(temperature=1.5, couple=False, top_p=0.97, repetition_penalty=1.6, min_new_tokens=2)


PROCESSORS = (
    RepetitionPenaltyLogitsProcessor(1.6),
    MinNewTokensLengthLogitsProcessor(len(PROMPT), 2, [EOS]),
    TemperatureLogitsWarper(1.5),
    TopPLogitsWarper(0.97),
)


@pytest.mark.slow
@every_policy
def test_distribution_of_the_loop_with_logits_processors(name: str, options: dict[str, Any]) -> None:
    """Repetition penalty and minimum length depend on the path, so every subtree is processed differently."""
    found, _ = loop_distribution(name, options, [EOS], PROCESSED)
    expected = {tokens: p for tokens, p in sequences(4, EOS, processed_by(PROCESSORS)).items() if p > 0}
    assert distance(found, expected) < 1e-12
    assert len(found) > 30  # the filters keep enough sequences to compare
    assert distance(found, sequences(4, EOS)) > 0.02  # the processors have an effect


def test_negative_control_biased_acceptance_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emitting the first child instead of the root's draw: the second token is always the draft's most probable one."""

    def eager(tree: Tree, choices: Sequence[int]) -> tuple[list[int], list[int]]:
        if len(tree) == 1 or choices[0] == UNDECIDED:
            return accept(tree, choices)
        return [0, 1], [int(tree.tokens[1]), choices[1]]

    monkeypatch.setattr("sage.decoding.verify.accept", eager)
    found, _ = loop_distribution("chain", {"depth": 1}, [])
    assert distance(found, sequences(4)) > 0.02


# -- texts of tiny models ------------------------------------------------------------------------------------------------------

LENGTH = 16
# Smaller budgets where the defaults take long; else default options.
ON_MODELS = {name: {} for name in sage.POLICIES if name != "autoregressive"} | {
    "spec_llava": {"budget": 24, "branch": 6, "steps": 4},
    "eagle2": {"total": 24, "depth": 6, "top_k": 5},
}


@pytest.fixture(scope="module", params=[(family, *heads) for family in MAKERS for heads in ((2, False), (4, True))], ids=str)
def model(request: pytest.FixtureRequest) -> tuple[sage.Target, Any, dict[str, torch.Tensor]]:
    """A target of either family with grouped or plain heads (4 query heads), tied or not, its draft and a prompt; float64."""
    family, kv_heads, tied = request.param
    target = MAKERS[family](kv_heads=kv_heads, tied=tied)
    inputs = in_float64(target, make_inputs(target, seed=kv_heads))
    return target, sage.new_draft(target, seed=0).double(), inputs


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_policy_gives_the_targets_own_text(temperature, model, monkeypatch):
    """Greedy: the text of Hugging Face. Sampling: the text of the same seed without speculation."""
    target, draft, inputs = model
    options = {"max_new_tokens": LENGTH, "temperature": temperature, "seed": 5}
    alone = sage.generate(target, None, inputs, policy="autoregressive", **options).tokens.tolist()
    if temperature == 0:
        assert greedy_text(target, inputs, LENGTH) == alone
    monkeypatch.setattr(generation, "new_session", lambda *_: OracleSession(alone, target.vocab_size, seed=1))
    for name, policy_options in ON_MODELS.items():
        out = sage.generate(target, draft, inputs, policy=make_policy(name, policy_options), **options)
        assert out.tokens.tolist() == alone, name
        assert sum(out.stats.accepted) >= len(alone) // 4, name


def test_negative_control_another_seed_gives_another_text(model: tuple[sage.Target, Any, dict[str, torch.Tensor]]) -> None:
    target, _, inputs = model
    options = {"policy": "autoregressive", "max_new_tokens": LENGTH, "temperature": 0.8}
    one, other = (sage.generate(target, None, inputs, seed=seed, **options).tokens.tolist() for seed in (5, 6))
    assert one != other

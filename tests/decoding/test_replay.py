"""Replay: a policy on its own recording has its own figures, on a wide one those of a decode from the same positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.messages import refused
from support.models import OracleSession, make_inputs
from support.toy_helpers import drafted_tree

import sage
from sage.costs.tables import Costs, Curve
from sage.decoding import generation
from sage.decoding.answer import StopCriterion
from sage.decoding.decoder import Request
from sage.decoding.settings import Sampling
from sage.decoding.verify import TargetSampler, Verifier, accept
from sage.replay.replay import NO_TOKEN, RecordedRound, Recording, record, replay
from sage.runtime.host_tensors import CPU
from sage.runtime.timing import Clock

LENGTH = 48
COSTS = Costs(Curve([1, 64], [1.0, 2.0]), Curve([1, 64], [0.05, 0.1]), context=10, overhead=0.01)
SMALL: dict[str, dict[str, Any]] = {
    "chain": {},
    "static": {},
    "eagle2": {"total": 24, "depth": 6, "top_k": 5},
    "spec_llava": {"budget": 12, "branch": 4, "steps": 3},
    "talon": {"total": 24, "top_k": 5},
    "ddd": {"total": 24, "depth": 6, "top_k": 5},
    "sage": {},
}


@pytest.fixture
def ready(tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch) -> tuple[sage.Target, Any, dict[str, torch.Tensor]]:
    """A target with a scripted draft that errs on purpose, so that every kind of round occurs."""
    target, inputs = tiny_qwen, make_inputs(tiny_qwen)
    alone = sage.generate(target, None, inputs, policy="autoregressive", max_new_tokens=LENGTH).tokens.tolist()
    monkeypatch.setattr(generation, "new_session", lambda *_: OracleSession(alone, target.vocab_size, seed=1))
    return target, sage.new_draft(target, seed=0), inputs


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_policy_on_its_own_recording_has_its_own_figures(ready: Any, temperature: float) -> None:
    target, draft, inputs = ready
    options = {"max_new_tokens": LENGTH, "temperature": temperature, "seed": 3}
    for name, settings in SMALL.items():
        same, recorder, replayed = (sage.policy(name, **settings) for _ in range(3))
        stats = sage.generate(target, draft, inputs, policy=same, **options).stats
        recording = record(target, draft, inputs, recorder, recorder.num_candidates, **options)
        found = replay([recording], replayed, COSTS)
        assert [one.accepted for one in found.rounds] == stats.accepted, name
        assert [(one.nodes, one.depth) for one in found.rounds] == [(e["nodes"], e["depth"]) for e in stats.rounds_log], name
        assert sum(len(one.widths) for one in found.rounds) == stats.draft_steps, name
        figures = found.summary()
        assert figures["coverage"] == 1 and figures["cut"] == 0
        assert figures["tokens_per_target_pass"] == pytest.approx(stats.tokens_per_target_pass)


def real_chain(target: sage.Target, recording: Recording, depth: int) -> list[int]:
    """Accepted tokens of a chain drafted anew, level by level, from the position of every recorded round."""
    accepted = []
    for recorded in recording.rounds:
        answer = recording.tokens
        session = OracleSession(answer, target.vocab_size, seed=1)
        session.known = recorded.position
        stop = StopCriterion(Sampling(max_new_tokens=recording.max_new_tokens))
        stop.append(answer[: recorded.position])
        chain = sage.policy("chain", depth=depth)
        chain.num_candidates = 16  # as recorded: top-1 and top-16 may order the oracle's equal probabilities differently
        verifier = Verifier(TargetSampler(Sampling(), torch.tensor([0])))
        request = Request(target, session, chain, verifier, stop, None, None, Clock(CPU), None)  # type: ignore[arg-type]
        request.root, request.draft_logits = answer[recorded.position - 1], session._start()
        tree = drafted_tree(request)
        chosen = [*answer[recorded.position :], *[NO_TOKEN] * len(tree)][: len(tree)]
        path, _ = accept(tree, chosen)
        accepted.append(len(path) - 1)
    return accepted


def test_chain_on_a_wide_recording_equals_a_drafted_chain(ready: Any) -> None:
    recording = record(*ready, max_new_tokens=LENGTH)
    found = replay([recording], sage.policy("chain", depth=4))
    assert found.summary()["coverage"] == 1
    assert [one.accepted for one in found.rounds] == real_chain(ready[0], recording, 4)
    assert any(one.accepted < 4 for one in found.rounds[:-1]) and any(one.accepted == 4 for one in found.rounds)
    assert found.seconds is None and "tokens_per_s" not in found.summary()


def toy_recording() -> Recording:
    """The answer 1 2 3 4; the root and token 2 are expanded, and the candidates contain the next token both times."""
    probs = torch.tensor([0.8, 0.2])
    candidates = {path: (probs, torch.tensor([token, 9])) for path, token in (((), 2), ((2,), 3))}
    return Recording(5, 10, 50, [1, 2, 3, 4], [RecordedRound(1, candidates)])


def test_uncovered_nodes_are_counted_and_never_accepted() -> None:
    """A chain of three expands the root, 2 and 2 3; the last is not covered, so 4 is not proposed. Times follow from tables:
    three nodes and the root, draft passes of one node each, two below the first level's.
    """
    found = replay([toy_recording()], sage.policy("chain", depth=3), COSTS)
    [one] = found.rounds
    assert (one.accepted, one.emitted, one.depth) == (2, 3, 3)
    assert (one.expanded, one.uncovered, one.is_truncated) == (3, 1, True)
    assert found.seconds == pytest.approx(COSTS.verify_s(4, 5) + 2 * COSTS.draft(1) + 0.01)
    assert found.summary()["tokens_per_s"] == pytest.approx(3 / found.seconds)
    [shallow] = replay([toy_recording()], sage.policy("chain", depth=2)).rounds
    assert (shallow.accepted, shallow.uncovered, shallow.is_truncated) == (2, 0, False)


def test_learning_policy_gets_labels_along_the_answer_and_a_copy_of_the_tables(ready: Any) -> None:
    recording = record(*ready, max_new_tokens=LENGTH)
    learner = sage.policy("cost_aware")
    before = COSTS.state()
    found = replay([recording] * 8, learner, COSTS)
    assert COSTS.state() == before and learner.costs is not COSTS
    assert found.summary()["coverage"] > 0.9
    labels, error = learner.learner.before.error()
    assert labels and 0 <= error <= 1
    assert learner.learner.calibrator.weights.tolist() != learner.learner.calibrator.start.tolist()


def test_cost_aware_policy_without_costs_is_refused() -> None:
    with refused("replay", "cost_aware"):
        replay([toy_recording()], sage.policy("cost_aware"))

"""The trace of a generation holds what the decoder did, and its page shows it, whatever the texts contain."""

import copy
from typing import Any

import pytest
import torch
from support.models import OracleSession, followed_by, make_inputs
from support.traces import HOSTILE, Page, made_trace

import sage
from sage.decoding import generation
from sage.io.page import visible
from sage.tracing.trace_page import Trace

LENGTH = 24
MIB = 2**20


@pytest.fixture
def ready(tiny_qwen: sage.Target, monkeypatch: pytest.MonkeyPatch) -> tuple[sage.Target, Any, dict[str, torch.Tensor]]:
    """A target with a scripted draft that errs on purpose."""
    inputs = make_inputs(tiny_qwen)
    alone = sage.generate(tiny_qwen, None, inputs, policy="autoregressive", max_new_tokens=LENGTH).tokens.tolist()
    monkeypatch.setattr(generation, "new_session", lambda *_: OracleSession(alone, tiny_qwen.vocab_size, seed=1))
    return tiny_qwen, sage.new_draft(tiny_qwen, seed=0), inputs


@pytest.mark.parametrize("name", ["chain", "sage", "eagle2"])
def test_trace_is_what_the_decoder_did(ready: Any, name: str) -> None:
    target, draft, inputs = ready
    policy = sage.policy(name, **({"total": 12, "depth": 4, "top_k": 4} if name == "eagle2" else {}))
    made = sage.trace(target, draft, inputs, policy=copy.deepcopy(policy), max_new_tokens=LENGTH)
    out = sage.generate(target, draft, inputs, policy=policy, max_new_tokens=LENGTH)
    assert made.output.tokens.tolist() == out.tokens.tolist()
    assert [one.num_accepted for one in made.rounds] == out.stats.accepted
    assert [one.num_verified - 1 for one in made.rounds] == [entry["nodes"] for entry in out.stats.rounds_log]
    assert sum((one.tokens for one in made.rounds), made.output.tokens[:1].tolist()) == out.tokens.tolist()
    assert (max(len(one.nodes) - one.num_verified for one in made.rounds) > 0) == (name == "eagle2")
    for one in made.rounds:
        assert [one.nodes[node] for node in one.path[1 : one.num_accepted + 1]] == one.tokens[: one.num_accepted]
        for node in one.path[1:]:  # greedy: the accepted token is the target's most probable one
            siblings = [other for other in range(1, one.num_verified) if one.parents[other] == one.parents[node]]
            assert one.target[node] == max(one.target[other] for other in siblings)
        assert all(0 <= prob <= 1 for prob in (*one.draft, *one.target))
        assert one.time_s["verify"] > 0
    assert made.race is not None and made.race.tokens.tolist() == out.tokens.tolist()
    assert made.speedup == pytest.approx(made.race.stats.decode_s / made.seconds)
    check_page(made)


def check_page(made: Trace) -> Page:
    """The trees and paths of a page are those of the statistics, and its answer is the text."""
    page = Page(made.html())
    rounds = page.data["rounds"]
    assert [one["verified"] - 1 for one in rounds] == [entry["nodes"] for entry in made.output.stats.rounds_log]
    assert [len(one["path"]) - 1 for one in rounds] == made.output.stats.accepted
    assert all(-1 <= parent < node for one in rounds for node, parent in enumerate(one["parents"]))
    assert len(page.answer) == len(made.output.tokens)
    if made.tokenizer is not None:
        assert "".join(page.answer) == visible(made.output.text)
    return page


def test_target_probabilities_are_those_of_a_plain_pass(ready: Any) -> None:
    target, draft, inputs = ready
    made = sage.trace(target, draft, inputs, policy="chain", max_new_tokens=8, race=False)
    one = next(one for one in made.rounds if one.num_accepted)
    before = sum((other.tokens for other in made.rounds if other.start < one.start), made.output.tokens[:1].tolist())
    embedded = target.embed(followed_by(target, inputs, torch.tensor(before)))
    with torch.no_grad():
        probs = target.lm_head(target.features(embedded).last[:, -1]).softmax(-1)[0]
    assert one.target[1] == pytest.approx(float(probs[one.nodes[1]]), rel=1e-3)
    assert made.race is None and made.speedup is None


@pytest.mark.parametrize(("policy", "length"), [("autoregressive", 6), ("chain", 1)])
def test_policy_that_never_drafts_and_answer_of_one_token(ready: Any, policy: str, length: int) -> None:
    target, draft, inputs = ready
    made = sage.trace(target, None if policy == "autoregressive" else draft, inputs, policy=policy, max_new_tokens=length)
    page = check_page(made)
    assert [one["verified"] for one in page.data["rounds"]] == [1] * (length - 1)
    assert not any(one["bonus"] is None for one in page.data["rounds"])


def test_a_large_page_is_small_and_a_notebook_shows_it_in_a_frame() -> None:
    assert len(made_trace(512, 65).html().encode()) < 2 * MIB
    framed = made_trace(4, 3, HOSTILE)._repr_html_()
    assert framed.startswith("<iframe srcdoc=") and framed.count('"') == 2 * framed.count('="')

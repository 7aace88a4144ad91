"""Runners of the bench on tiny random targets: Hugging Face decoders, first answers, times."""

import pytest
import torch
from support.models import MAKERS, make_inputs, make_qwen

import sage
from sage.bench.runners import (
    AUTOREGRESSIVE,
    HF_ASSISTED,
    HF_COMPILED,
    HF_GENERATE,
    HF_STATIC,
    PROMPT_LOOKUP,
    HFRunner,
    PolicyRunner,
    baseline_runner,
)
from sage.costs import measure
from sage.costs.measure import measure_costs
from sage.decoding.settings import Sampling
from sage.runtime.timing import Preparations, decoding_now_s

SAMPLING = Sampling(max_new_tokens=8)


def own_tokens(target, inputs):
    return PolicyRunner(target, None, AUTOREGRESSIVE).run(inputs, SAMPLING).tokens


def test_hugging_face_decoders_agree_with_the_autoregressive_policy(tiny_target):
    target, inputs = tiny_target, make_inputs(tiny_target)
    own = own_tokens(target, inputs)
    for name in (HF_GENERATE, HF_STATIC, PROMPT_LOOKUP):
        run = baseline_runner(target, name).run(inputs, SAMPLING)
        assert run.tokens == own, name
        assert 0 < run.decode_s < run.wall_s and run.prefill_tokens >= 1
    assistant = MAKERS[target.family.model_type](seed=1).model
    assert baseline_runner(target, HF_ASSISTED, assistant).run(inputs, SAMPLING).tokens == own


def test_hugging_face_compiles_passes_on_a_cpu(tiny_target, monkeypatch):
    target, calls = tiny_target, []
    monkeypatch.setattr(torch, "compile", lambda function, **options: calls.append(options) or function)
    inputs = make_inputs(target)
    own, runner = own_tokens(target, inputs), baseline_runner(target, HF_COMPILED)
    assert [runner.run(inputs, SAMPLING).tokens for _ in range(2)] == [own] * 2
    (options,) = calls
    assert options["dynamic"] and options["mode"] == "default" and runner.may_fail
    assert baseline_runner(target, HF_STATIC).run(inputs, SAMPLING).tokens == own and len(calls) == 1


def test_prompt_lookup_does_not_copy_image_placeholders(tiny_target):
    """A prompt that ends like the text before its image makes plain prompt lookup propose placeholders and fail."""
    target, inputs = tiny_target, make_inputs(tiny_target)
    inputs["input_ids"][0, -2:] = inputs["input_ids"][0, 4:6]  # the two tokens before the image
    assert baseline_runner(target, PROMPT_LOOKUP).run(inputs, SAMPLING).tokens == own_tokens(target, inputs)
    with pytest.raises((ValueError, RuntimeError)):  # the negative control
        HFRunner(target, PROMPT_LOOKUP, False, prompt_lookup_num_tokens=10).run(inputs, SAMPLING)


def test_a_checkpoints_generation_config_does_not_change_the_baseline():
    """Released checkpoints ship a repetition penalty and sampling; greedy decoding must not inherit them."""
    target, inputs = make_qwen(), make_inputs(make_qwen())
    plain = HFRunner(target).run(inputs, SAMPLING).tokens
    shipped = target.model.generation_config
    shipped.repetition_penalty, shipped.do_sample, shipped.temperature = 5.0, True, 9.0
    assert HFRunner(target).run(inputs, SAMPLING).tokens == plain


@pytest.mark.slow
@pytest.mark.parametrize(("is_first_answer", "is_fresh", "measured"), [(False, True, 1), (True, True, 3)])
def test_a_first_answer_includes_reading_costs_and_no_answer_measuring_them(
    is_first_answer, is_fresh, measured, monkeypatch, tmp_path
):
    """A policy that decodes all prompts has costs once. A new policy for every run reads them; with `fresh_costs`, it
    measures them. Measuring counts for no time of an answer.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    monkeypatch.setattr(measure, "measure_costs", lambda *args: calls.append(1) or measure_costs(*args))
    target = make_qwen()
    draft = sage.new_draft(target, "eagle", seed=0)
    policy = sage.policy("cost_aware", fresh_costs=is_fresh)
    runner = PolicyRunner(target, draft, "cost_aware", policy, is_first_answer=is_first_answer)
    runs = []
    for _ in range(3):
        start, prepared_s, before = decoding_now_s(), Preparations.seconds, len(calls)
        runs.append(runner.run(make_inputs(target), SAMPLING))
        assert runs[-1].wall_s <= decoding_now_s() - start  # the clock of `run` lies within this one
        assert (Preparations.seconds > prepared_s) == (len(calls) > before)
        assert sum(runs[-1].time_s.values()) == pytest.approx(runs[-1].wall_s) and runs[-1].time_s["draft_prefill"] > 0
        assert runs[-1].decode_s == pytest.approx(
            runs[-1].wall_s - runs[-1].time_s["vision"] - runs[-1].time_s["target_prefill"]
        )
    assert len(calls) == measured and len({tuple(run.tokens) for run in runs}) == 1
    learner = runner.policy.learner
    assert (learner.rounds < sum(run.stats.rounds for run in runs)) == is_first_answer

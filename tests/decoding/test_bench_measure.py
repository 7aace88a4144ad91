"""Order of runs, times, counts, losslessness and intervals of the bench, with fake runners and tiny random targets."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from support.messages import refused
from support.models import MAKERS, followed_by, make_inputs, make_qwen, random_draft

import sage
from sage.bench.measurement import BenchPrompt, Planned, measure, rotated
from sage.bench.report import build_report
from sage.bench.report_table import measured_with
from sage.bench.runners import (
    AUTOREGRESSIVE,
    HF_ASSISTED,
    HF_COMPILED,
    HF_GENERATE,
    HF_STATIC,
    PROMPT_LOOKUP,
    HFRunner,
    PolicyRunner,
    TimedRun,
    baseline_runner,
)
from sage.bench.summary import (
    RunningFigures,
    acceptance_by_depth,
    first_difference,
    pooled_counts,
    rate_interval,
    summarize,
    top2_gap,
)
from sage.costs import measure as cost_measure
from sage.costs.measure import measure_costs
from sage.decoding.answer import Stats
from sage.decoding.settings import Sampling
from sage.runtime.timing import PHASES, Preparations, decoding_now_s

SAMPLING = Sampling(max_new_tokens=8)
PROMPTS = [BenchPrompt(name=f"p{i}", inputs={}, family="even" if i % 2 == 0 else "odd") for i in range(4)]


def stats_of(log):
    """Statistics of rounds of (depth, nodes, accepted)."""
    depths, _, accepted = map(list, zip(*log, strict=True))
    rounds = [dict(zip(("depth", "nodes", "accepted"), entry, strict=True)) for entry in log]
    sizes = {"rounds": len(log), "target_passes": len(log), "draft_steps": sum(depths)}
    return Stats(**sizes, accepted=accepted, new_tokens=1 + sum(accepted) + len(log), rounds_log=rounds)


class FakeRunner:
    """Returns given tokens after a prefill of a second and a given time, and records its calls."""

    may_fail = False

    def __init__(self, name, decode_s, tokens=(5, 6, 7), is_autoregressive=False, log=None):
        self.name, self.decode_s, self.tokens, self.is_autoregressive = name, decode_s, list(tokens), is_autoregressive
        self.log = [] if log is None else log

    def run(self, inputs, sampling):
        self.log.append((self.name, sampling.max_new_tokens))
        time_s = dict.fromkeys(PHASES, 0.0) | {"target_prefill": 1.0, "verify": self.decode_s}
        times = {"wall_s": 1.0 + self.decode_s, "decode_s": self.decode_s, "time_s": time_s}
        return TimedRun(tokens=self.tokens, stats=stats_of([(2, 4, 1)]), **times)


def fakes(**changes):
    log = []
    own = FakeRunner(AUTOREGRESSIVE, 4.0, is_autoregressive=True, log=log)
    hf = FakeRunner(HF_GENERATE, 2.0, is_autoregressive=True, log=log)
    return [own, hf, FakeRunner("sage", 1.0, log=log, **changes)], log


def summary(runners, prompts=PROMPTS, target=None, **options):
    return summarize(measure(runners, prompts, SAMPLING, **options), target, ["sage"])


def test_runners_rotate_after_a_short_warm_up():
    runners, log = fakes()
    measure(runners, PROMPTS[:1], Sampling(max_new_tokens=64), repeats=3, warmup=1)
    names = [name for name, _ in log]
    assert log[:3] == [(AUTOREGRESSIVE, 32), (HF_GENERATE, 32), ("sage", 32)]
    assert names[3:] == [r.name for shift in range(3) for r in rotated(runners, shift)]
    for place in range(3):
        assert len({names[3 + 3 * repeat + place] for repeat in range(3)}) == 3


@pytest.mark.parametrize(
    ("after", "prompts", "repeats", "counts"), [(2, 2, 1, [1, 1]), (4, 3, 2, [2, 1, 1]), (6, 3, 2, [2, 2, 2])]
)
def test_an_interrupted_measurement_contains_the_complete_prompts(after, prompts, repeats, counts):
    """The last runner is interrupted in the middle of a prompt, so that the others' runs of that prompt are dropped."""
    runners, _ = fakes()
    left = itertools.count()

    def run(inputs, sampling, run=runners[2].run):
        if next(left) == after:
            raise KeyboardInterrupt
        return run(inputs, sampling)

    runners[2].run = run
    asked, seen = [BenchPrompt(name=str(i), inputs={}) for i in range(3)], []
    figures = RunningFigures(runners, ["autoregressive", "sage"])
    options = {"warmup": 0, "observe": lambda runs: (seen.append(set(runs)), figures.add(runs)), "ends": (KeyboardInterrupt,)}
    found = measure(runners, asked, SAMPLING, 2, **options)
    assert ([prompt.name for prompt in found.prompts], found.repeats) == (["0", "1", "2"][:prompts], repeats)
    assert [[len(runs) for runs in own] for own in found.runs.values()] == [counts] * 3
    assert found.planned == (None if after == 6 else Planned(prompts=3, repeats=2)) and len(seen) == after
    assert str(figures) == f"sage {2.0:.2f} tokens/pass 2.00x"
    target = SimpleNamespace(
        name="t",
        device=torch.device("cpu"),
        dtype=torch.float32,
        passes="eager",
        max_head_dim=8,
        linear=None,
        quantization=None,
    )
    report = build_report(found, target, "draft", ["sage"])
    assert report["passes"] == "eager"
    partial = {"prompts": prompts, "repeats": repeats, "planned_prompts": 3, "planned_repeats": 2}
    assert report.get("partial") == (None if after == 6 else partial)
    assert measured_with(report).startswith("partial: interrupted after") == (after < 6)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"prompts": []}, ["no prompts"]),
        ({"repeats": 0}, ["repeats: 0"]),
        ({"sampling": Sampling(max_new_tokens=1)}, ["max_new_tokens: 1"]),
        ({"sampling": Sampling(stop="a")}, ["sampling: stop"]),
        ({"runners": [FakeRunner("sage", 1.0)]}, ["autoregressive"]),
        ({"runners": [FakeRunner("a", 1.0, is_autoregressive=True)] * 2}, ["a is given twice"]),
    ],
)
def test_an_impossible_measurement_is_refused(change, parts):
    arguments = {"runners": fakes()[0], "prompts": PROMPTS, "sampling": SAMPLING, "repeats": 1} | change
    with refused(*parts):
        measure(**arguments)


class Failing(FakeRunner):
    """Fails from its third run on."""

    may_fail = True

    def run(self, inputs, sampling):
        if len(self.log) == 2:
            raise IndexError("no such\n row")
        return super().run(inputs, sampling)


def test_a_baseline_that_fails_is_excluded_with_the_reason_but_no_policy_may_fail():
    measurement = measure([*fakes()[0], Failing("hf_x", 0.1, is_autoregressive=True)], PROMPTS, SAMPLING, repeats=1)
    assert measurement.failed == {"hf_x": "IndexError on prompt p1: no such row"}
    found = summarize(measurement, None, ["sage"])
    assert "hf_x" not in found["baselines"] and found["fastest_baseline"] == HF_GENERATE
    assert found["failed_baselines"] == measurement.failed
    failing = Failing("sage", 0.1)
    failing.may_fail = False
    with pytest.raises(IndexError):
        measure([*fakes()[0][:2], failing], PROMPTS, SAMPLING, repeats=1)
    target = make_qwen()
    assert not any(baseline_runner(target, name).may_fail for name in (AUTOREGRESSIVE, HF_GENERATE))


def test_speedup_is_against_the_fastest_autoregressive_runner_and_margins_against_every_other():
    """Two tokens after the prefill's: sage 2 / 1 s, Hugging Face 2 / 2 s, the autoregressive policy 2 / 4 s; prompt lookup is
    faster, but not autoregressive.
    """
    found = summary([*fakes()[0], FakeRunner(PROMPT_LOOKUP, 0.1)])
    part = found["policies"]["sage"]
    assert found["fastest_baseline"] == HF_GENERATE
    assert (part["match"], part["total"], part["match_hf"], part["first_gaps"]) == (4, 4, 4, [])
    assert part["tokens_per_s"] == pytest.approx(2.0) and part["speedup"] == pytest.approx(2.0)
    assert part["speedup_end_to_end"] == pytest.approx((3 / 2) / (3 / 3))
    assert found["baselines"][AUTOREGRESSIVE]["speedup"] == pytest.approx(0.5)
    assert found["baselines"][HF_GENERATE]["speedup"] == 1.0
    assert found["baselines"][PROMPT_LOOKUP]["speedup"] == pytest.approx(20.0)
    margins = found["margins"]
    assert margins["policy"] == "sage" and set(margins["over"]) == {AUTOREGRESSIVE, HF_GENERATE, PROMPT_LOOKUP}
    assert margins["over"][HF_GENERATE] == {"ratio": pytest.approx(2.0), "ci": pytest.approx([2.0, 2.0])}
    assert margins["over"][AUTOREGRESSIVE]["ratio"] == pytest.approx(4.0)
    assert "ci" not in summary(fakes()[0], PROMPTS[:1])["margins"]["over"][HF_GENERATE]
    assert summarize(measure(fakes()[0][:2], PROMPTS, SAMPLING), None, [AUTOREGRESSIVE])["margins"] == {}


def test_answers_of_one_token_have_no_decoding_speed():
    runners = [FakeRunner(name, 0.1, tokens=[1], is_autoregressive=name != "sage") for name in (AUTOREGRESSIVE, "sage")]
    part = summary(runners, repeats=1)["policies"]["sage"]
    assert part["tokens_per_s"] == part["speedup"] == 0.0 and "speedup_ci" not in part


def runs_with(*logs):
    """A run per log."""
    stats = [stats_of(log) for log in logs]
    return [[TimedRun(tokens=[0] * one.new_tokens, wall_s=1.0, decode_s=1.0, stats=one)] for one in stats]


def test_counts_are_pooled_over_rounds_not_averaged_over_prompts():
    counts = pooled_counts(runs_with([(3, 9, 3)], [(3, 9, 0), (3, 9, 1), (1, 2, 1)]))
    assert counts["mean_accepted_draft"] == pytest.approx(5 / 4)
    assert counts["tokens_per_target_pass"] == pytest.approx(9 / 4)
    assert counts["draft_steps_per_round"] == pytest.approx(10 / 4)
    assert counts["nodes_per_round"] == pytest.approx(29 / 4)
    assert pooled_counts(runs_with([(0, 0, 0)]))["mean_accepted_draft"] == 0.0
    assert acceptance_by_depth(runs_with([(0, 0, 0)])) == []


def test_conditional_acceptance_by_hand():
    """Rounds (depth, accepted): (3, 3), (3, 1), (1, 1), (2, 0). Of those with one accepted, two drafted to depth 2."""
    runs = runs_with([(3, 5, 3), (3, 5, 1)], [(1, 2, 1), (2, 3, 0)])
    assert acceptance_by_depth(runs) == [
        {"depth": 1, "tried": 4, "kept": 3},
        {"depth": 2, "tried": 2, "kept": 1},
        {"depth": 3, "tried": 1, "kept": 1},
    ]


def test_first_difference_counts_missing_tokens():
    others = ([4, 5, 6], None), ([4, 9, 6], 1), ([4, 5], 2), ([4, 5, 6, 7], 3), ([], 0)
    assert [first_difference([4, 5, 6], other) for other, _ in others] == [index for _, index in others]


def test_the_gap_is_that_of_the_targets_own_logits(tiny_target):
    """Against the complete model on prompt + prefix, by Hugging Face's own forward."""
    inputs, prefix = make_inputs(tiny_target), [7, 8, 9]
    with torch.no_grad():
        logits = tiny_target.model(**followed_by(tiny_target, inputs, torch.tensor(prefix))).logits
    best = logits[0, -1].topk(2).values
    assert top2_gap(tiny_target, inputs, prefix) == pytest.approx(float(best[0] - best[1]), abs=1e-4)
    assert top2_gap(tiny_target, inputs, []) != pytest.approx(float(best[0] - best[1]), abs=1e-3)


def test_a_wrong_output_is_detected_and_its_gap_reported():
    target = make_qwen()
    prompts = [BenchPrompt(name="p", inputs=make_inputs(target))]
    part = summary(fakes(tokens=(5, 6, 8))[0], prompts, target, repeats=1)["policies"]["sage"]
    assert (part["match"], part["total"], part["match_hf"]) == (0, 1, 0)
    assert part["first_gaps"] == [pytest.approx(top2_gap(target, prompts[0].inputs, [5, 6]))]


def test_interval_of_equal_prompts_is_a_point_and_of_unequal_ones_contains_the_ratio():
    """Prompts are resampled in pairs: where both decoders are ten times slower on the second one, there is no variance."""
    assert rate_interval([2, 2], [1, 1], [2, 2], [2, 2]) == (2.0, 2.0)
    assert rate_interval([1, 1], [1, 10], [1, 1], [2, 20]) == pytest.approx((2.0, 2.0))
    assert rate_interval([2], [1], [2], [2]) is None and rate_interval([2], [1]) is None, "of one prompt"
    low, high = rate_interval([2, 2, 2], [1, 2, 3], [2, 2, 2], [2, 2, 2])
    assert 2 / 3 <= low < 1.0 < high <= 2.0
    assert rate_interval([2, 4], [1, 1]) == (2.0, 4.0)


def test_prompts_decoded_together_have_their_own_texts_and_shares_of_the_time(tiny_target):
    """The last group is smaller; the report states the number of prompts that a policy decodes together."""
    prompts = [BenchPrompt(name=f"p{i}", inputs=make_inputs(tiny_target, i, 14 + i), seed=i) for i in range(3)]
    sampling = Sampling(max_new_tokens=6, temperature=0.7)
    draft = random_draft(tiny_target)
    runners = [PolicyRunner(tiny_target, None, AUTOREGRESSIVE), PolicyRunner(tiny_target, draft, "chain")]
    apart, seen = measure(runners, prompts, sampling, 1, 0), []
    found = measure(runners, prompts, sampling, 1, 0, progress=lambda *counts: seen.append(counts), batch_size=2)
    assert [[run.tokens for (run,) in own] for own in found.runs.values()] == [
        [run.tokens for (run,) in own] for own in apart.runs.values()
    ]
    for (run,) in found.runs["chain"]:
        assert 0 < run.decode_s < run.wall_s and sum(run.time_s.values()) == pytest.approx(run.wall_s)
    report = build_report(found, tiny_target, "draft", ["chain"])
    assert seen == [(1, 3), (2, 3), (3, 3)] and report["batch_size"] == 2
    assert "policies decode 2 prompts together" in measured_with(report)
    assert "batch_size" not in build_report(apart, tiny_target, "draft", ["chain"])
    with refused("batch_size: 0 is not allowed", "at least 1"):
        measure(runners, prompts, sampling, batch_size=0)


# -- runners ------------------------------------------------------------------------------------------------------------


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

    monkeypatch.setattr(cost_measure, "measure_costs", lambda *args: calls.append(1) or measure_costs(*args))
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

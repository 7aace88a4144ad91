"""validate(): the folder it writes, the state it restores, the mistakes it refuses."""

import json
from pathlib import Path

import pytest
import torch
from support.data_helpers import save_target
from support.messages import refused
from support.models import make_inputs, make_qwen

import sage
from data_prep.conversation import Conversation
from sage.bench.measurement import BenchPrompt, Interrupted
from train.config.schema import Baseline, DecodeConfig, Precision
from train.report.web import ranked_prompts
from train.validation.prompts import PromptSet
from train.validation.validate import ReportInfo, validate

# The documented keys of report.json; further keys are allowed.
REPORT_KEYS = {"schema", "target", "draft", "device", "dtype", "prompts", "max_new_tokens", "temperature", "seed"}
FLOATS = ("mean_accepted_draft", "tokens_per_target_pass", "tokens_per_s", "speedup", "speedup_end_to_end")
POLICY_KEYS = dict.fromkeys(FLOATS, float) | {"match": int, "total": int, "first_gaps": list, "time_s": dict}


def decode(**changes):
    settings = {"policies": ["autoregressive", "sage"], "baselines": [Baseline.hf_generate], "num_prompts": 2}
    return DecodeConfig(**(settings | {"max_new_tokens": 6, "traces": 0} | changes))


def measure_draft(decode, target, draft, step, run_dir, inputs):
    """Validates on ready model inputs, which the target needs no processor for."""
    talks = [Conversation(id=f"prompt-{number}", messages=[]) for number in range(len(inputs))]
    prompts = PromptSet(target, decode, talks)
    ready = zip(talks, inputs, strict=True)
    prompts._first_turns |= {id(talk): BenchPrompt(name=talk.id, inputs=prepared) for talk, prepared in ready}
    return validate(decode, target, draft, prompts, ReportInfo(run_dir=run_dir, step=step))


@pytest.fixture
def models():
    target = make_qwen()
    return target, sage.new_draft(target, "eagle", seed=0)


@pytest.mark.slow
def test_the_report_has_the_documented_schema_and_lies_beside_page_and_plots(models, tmp_path):
    target, draft = models
    report = measure_draft(decode(), target, draft, 100, tmp_path, [make_inputs(target, seed) for seed in range(3)])
    folder = tmp_path / "validation" / "step_00000100"
    assert report["path"] == str(folder)
    written = json.loads((folder / "report.json").read_text())
    assert written == {key: value for key, value in report.items() if key != "path"}
    assert set(written) >= REPORT_KEYS and written["prompts"] == 2 and written["step"] == 100
    for part in written["policies"].values():
        assert {key: type(part[key]) for key in POLICY_KEYS} == POLICY_KEYS
    assert set(written["baselines"]) == {"autoregressive", "hf_generate"}
    page = (folder / "report.md").read_text()
    for plot in folder.glob("*.png"):
        assert f"]({plot.name})" in page
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_later_turns_follow_the_targets_own_answers(tmp_path):
    target = sage.load_target(save_target("qwen2_5_vl", tmp_path / "target"))
    ask = {"role": "user", "content": [{"type": "text", "text": "Hi?"}]}
    talks = [Conversation(name, [ask], meta={"follow_ups": ["And?", "So?"]}) for name in "ab"]
    draft = sage.new_draft(target, "eagle", seed=0)
    settings = decode(num_prompts=4, baselines=[], policies=["sage", "chain"], traces=1)

    def stop(done, total, _):
        if (done, total) == (1, 2):  # of the prompts that are traced
            raise Interrupted

    prompts, info = PromptSet(target, settings, talks), ReportInfo(run_dir=tmp_path, step=1)
    report = validate(settings, target, draft, prompts, info, progress=stop)
    assert report["prompts"] == report["policies"]["sage"]["match"] == 4  # a's three turns and b's first
    folder = Path(report["path"])
    described, page = json.loads((folder / "prompts.json").read_text()), (folder / "report.html").read_text()
    texts = {"a": "Hi?", "a-turn-2": "And?", "a-turn-3": "So?", "b": "Hi?"}
    assert {name: one["text"] for name, one in described.items()} == texts
    traced = [name for name, one in described.items() if one["traces"]]
    assert traced == [ranked_prompts(report)[0]]  # the best one; before the worst one, the measurement was interrupted
    assert set(described[traced[0]]["traces"]) == {"sage", "chain"} and "partial" not in report
    for name in described[traced[0]]["traces"].values():
        assert f'href="{name}"' in page and described[traced[0]]["text"] in (folder / name).read_text()


@pytest.mark.slow
def test_weights_mode_and_random_state_are_restored_also_after_a_failure(models, tmp_path, monkeypatch):
    target, draft = models
    draft.train()
    held = {name: weight.data_ptr() for name, weight in draft.named_parameters()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    prompts = [make_inputs(target)]
    report = measure_draft(decode(temperature=0.5, dtype=Precision.bf16), target, draft, 1, tmp_path, prompts)
    assert torch.equal(torch.rand(3), expected)
    assert draft.training and {name: weight.data_ptr() for name, weight in draft.named_parameters()} == held
    assert report["dtype"] == "bfloat16" and target.dtype == draft.dtype == torch.float32
    monkeypatch.setattr("train.validation.validate.measure", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure_draft(decode(dtype=Precision.bf16), target, draft, 2, tmp_path, prompts)
    assert target.dtype == draft.dtype == torch.float32 and not (tmp_path / "validation" / "step_00000002").exists()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"options": {"sage": {"colour": 1}}}, ["decode.options.sage.colour"]),
        ({"policies": ["sage"], "options": {"chain": {"depth": "x"}}}, ["decode.options.chain.depth", "'x'"]),
        ({"policies": ["oracle"]}, ["'oracle'", "autoregressive"]),
        ({"baselines": [Baseline.hf_assisted]}, ["hf_assisted"]),
    ],
)
def test_mistakes_are_named_before_anything_is_written(models, tmp_path, changes, parts):
    with refused(*parts):
        measure_draft(decode(**changes), *models, 1, tmp_path, [make_inputs(models[0])])
    assert not any(tmp_path.iterdir())


def test_a_drafting_policy_needs_a_draft(models, tmp_path):
    with refused("decode.policies: sage"):
        measure_draft(decode(), models[0], None, 1, tmp_path, [make_inputs(models[0])])
    report = measure_draft(decode(policies=["autoregressive"]), models[0], None, 1, tmp_path, [make_inputs(models[0])])
    assert report["policies"]["autoregressive"]["speedup"] > 0


def test_a_prompt_that_cannot_be_prepared_is_named(tmp_path):
    target = sage.load_target(save_target("qwen2_5_vl", tmp_path / "target"))
    talk = Conversation(id="c8", messages=[{"role": "user", "content": []}])
    with refused("validation prompt c8"):
        PromptSet(target, decode(), [talk]).prepare_first_turns()

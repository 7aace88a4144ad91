"""sage-validate: the selected draft, target and settings, and one line for every mistake."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from omegaconf import OmegaConf
from support.data_helpers import save_run, save_target
from support.messages import refused

import sage
from sage.bench.runners import PolicyRunner
from sage.commands.cli import EXIT_STOPPED
from train.cli import validate as validate_cli
from train.cli.validate import run_validation
from train.config.command_line import expand
from train.config.hydra_app import compose
from train.config.resuming import with_run_of_draft
from train.config.schema import ValidateConfig
from train.monitor.progress import Display
from train.report.__main__ import main as draw
from train.report.verdict import add_verdict


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("validate")
    return save_run(folder / "run", save_target("qwen2_5_vl", folder / "target"))


def composed(*overrides):
    return compose("validate", list(overrides), ValidateConfig)


def measured(*arguments):
    overrides = expand(arguments, ValidateConfig)
    with mock.patch.object(validate_cli, "task_overrides", lambda: overrides):
        return run_validation(compose("validate", overrides, ValidateConfig))


# -- end to end ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_folder_is_measured_with_its_own_settings(run, capsys, monkeypatch):
    exports, progress = [], []
    monkeypatch.setattr(
        "train.validation.validate.export_choice", lambda draft, config: f"{draft.config.model_type} for {config.model_type}"
    )
    monkeypatch.setattr(
        "train.validation.validate.add_verdict", lambda *facts: exports.append(facts[-2:]) or add_verdict(*facts)
    )
    monkeypatch.setattr(Display, "show_validation", lambda _, *now: progress.append(now))
    monkeypatch.setattr("train.monitor.progress.open_display", lambda *_, **__: Display())
    assert measured(f"checkpoint={run}") == 0
    assert [now[:2] for now in progress] == [(0, 2), (1, 2), (2, 2)] and progress[2][2].startswith("static 1.00 tokens/pass")
    assert exports == [("sage_eagle for qwen2_5_vl", 2)]
    report = json.loads((run / "checks" / "draft_step_00000012" / "report.json").read_text())
    assert list(report["policies"]) == ["autoregressive", "static"]
    assert (report["prompts"], report["max_new_tokens"], report["target"]) == (2, 6, "target")
    assert report["policies"]["static"]["match"] == report["policies"]["static"]["match_hf"] == 2
    shown = capsys.readouterr().out
    assert f"\nverdict: {report['verdict']['sentence']}\n" in shown and "\nnext: sage-" in shown
    assert "tokens/pass" in shown and str(run / "checks" / "draft_step_00000012" / "report.md") in shown
    assert "2 prompts, 1 run each, float32 on cpu, temperature 0, at most 6 new tokens" in shown
    page = (run / "checks" / "draft_step_00000012" / "report.md").read_text()
    assert f"\n* **verdict:** {report['verdict']['sentence']}\n" in page
    assert "2 prompts, 1 run each, float32 on cpu, temperature 0, at most 6 new tokens" in page


@pytest.mark.slow
def test_ctrl_c_keeps_the_prompts_that_were_measured(run, tmp_path, monkeypatch, capsys):
    run = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("checks")))
    decode, answers = PolicyRunner.run, []

    def interrupted(*arguments):
        answers.append(None)
        if len(answers) == 4:  # the second policy on the second prompt
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(PolicyRunner, "run", interrupted)
    assert measured(f"checkpoint={run}", "decode.baselines=[]", "decode.warmup=0") == EXIT_STOPPED
    report = json.loads((run / "checks" / "draft_step_00000012" / "report.json").read_text())
    assert report["partial"] == {"prompts": 1, "repeats": 1, "planned_prompts": 2, "planned_repeats": 1}
    assert report["prompts"] == report["policies"]["static"]["total"] == 1
    shown = capsys.readouterr().out
    assert "partial: interrupted after 1 of 2 prompts" in shown and "report.md" in shown


def test_an_unwritable_report_is_refused_before_anything_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sage, "load_target", None)
    (tmp_path / "file").write_text("")
    with refused("file/here/validation/step_00000012/report.json", error=OSError):
        measured(f"checkpoint={run}", f"out={tmp_path}/file/here")
    monkeypatch.setattr(validate_cli, "run_of", lambda _: tmp_path / "file")
    monkeypatch.setattr(validate_cli, "with_run_of_draft", lambda config, *_: config)
    with refused("file/checks/draft_step_00000012/report.json", error=OSError):
        measured(f"checkpoint={run}")


def test_a_target_is_loaded_with_its_device_map_and_attention(run, tmp_path, monkeypatch):
    def load(*_, **options):
        raise ValueError(f"loaded with {options['device_map']} and {options['attention']}")

    monkeypatch.setattr(sage, "load_target", load)
    with refused("loaded with auto and eager"):
        measured(f"checkpoint={run}", f"out={tmp_path}", "device_map=auto", "target.attention=eager")
    with refused("device_map", "auto, balanced, sequential"):
        measured(f"checkpoint={run}", f"out={tmp_path}", "device_map=disk")


# -- which draft -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([], ["checkpoint: missing", "checkpoint=RUN"]),
        (["checkpoint=/no/such"], ["checkpoint: /no/such", "RUN/draft_best"]),
        (["checkpoint={run}", "draft={run}/draft"], ["checkpoint: given twice", "draft="]),
        (["checkpoint={run}", "launch.gpus=7"], ["launch.gpus=7", "sage-validate"]),
        (["checkpoint={run}", "target.path=/no/such"], ["target.path=/no/such"]),
    ],
)
def test_mistakes_are_one_line_that_names_the_remedy(run, overrides, parts):
    with refused(*parts) as caught:
        measured(*(override.replace("{run}", str(run)) for override in overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("decode: [", ["config.yaml"]),
        ("target: {name: t, path: x, dtype: fp32}", ["config.yaml", "data"]),
        ("target: {name: t, path: x, dtype: fp7}\ndata: {}\ndecode: {}", ["target.dtype: ", "fp7"]),
    ],
)
def test_a_corrupt_run_is_named(run, tmp_path, content, parts):
    (tmp_path / "config.yaml").write_text(content)
    with refused(*parts):
        with_run_of_draft(composed(), run / "draft", tmp_path, [])


# -- which settings --------------------------------------------------------------------------------------------------


def test_only_named_fields_replace_those_of_the_run_and_options_are_merged(run):
    def settled(*overrides):
        return with_run_of_draft(composed(*overrides), run / "draft", run, overrides).decode

    saved = settled()
    assert (saved.policies, saved.num_prompts) == (["autoregressive", "static"], 2)
    assert settled("decode.num_prompts=9") == replace(saved, num_prompts=9)
    options = settled("+decode.options.sage.top_k=6").options
    assert options == {"static": {}, "sage": {"max_depth": 5, "top_k": 6}}
    assert settled("decode=default", "decode.num_prompts=9") == composed("decode=default", "decode.num_prompts=9").decode


def test_a_choice_within_a_group_replaces_its_own_fields_only(run):
    for overrides in (
        ["decode/policy=[autoregressive,chain]"],
        ["decode/policy=[chain]", "decode.policies=[autoregressive,chain]"],
    ):
        settled = with_run_of_draft(composed(*overrides), run / "draft", run, overrides)
        assert settled.decode.policies == ["autoregressive", "chain"] and "sage" not in settled.decode.options
        assert settled.decode.options["chain"] == {}
        assert (settled.decode.num_prompts, settled.decode.max_new_tokens) == (2, 6)
    saved = OmegaConf.load(run / "config.yaml").data
    overrides = ["+data/validation=textvqa", "data.validation.textvqa.path=x"]
    settled = with_run_of_draft(composed(*overrides), run / "draft", run, overrides)
    assert settled.data.validation["textvqa"].path == "x" and settled.data.name == saved.name
    assert settled.data.max_length == 777 and settled.decode.num_prompts == 2


# -- as a command ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_reports_can_be_drawn_again(run, tmp_path, monkeypatch, capsys):
    report = run / "checks" / "draft_step_00000012" / "report.json"
    if not report.is_file():
        measured(f"checkpoint={run}")
    monkeypatch.setattr("sys.argv", ["report", str(report), "--out", str(tmp_path)])
    draw()
    assert (tmp_path / "report.md").read_text() == report.with_name("report.md").read_text()
    assert (tmp_path / "speed.png").is_file()
    assert capsys.readouterr().out.endswith(f"written: {tmp_path / 'report.md'}\n")
    for out in (tmp_path / "report.md" / "x", tmp_path / "speed.png"):
        monkeypatch.setattr("sys.argv", ["report", str(report), "--out", str(out)])
        with refused(str(out), error=(ValueError, OSError)):
            draw()


@pytest.mark.parametrize(("content", "part"), [(None, "r.json"), ("{", "r.json"), ('{"kind": "costs"}', "r.json")])
def test_other_files_than_reports_cannot_be_drawn(tmp_path, monkeypatch, content, part):
    path = tmp_path / "r.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr("sys.argv", ["report", str(path)])
    with refused(part):
        draw()

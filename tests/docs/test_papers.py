"""`python -m benchmarks.papers`: measurements on random targets, tables from figures alone, current pages and figures."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml
from support.models import text_sizes
from support.train_helpers import make_target
from transformers import LlamaConfig, LlamaForCausalLM

import sage
from benchmarks.papers import __main__ as command
from benchmarks.papers import runs
from benchmarks.papers.claims import claims
from benchmarks.papers.measure import Lab, correlation, read_measurements, runs_of
from benchmarks.papers.runs import digest, load_settings
from benchmarks.papers.tables import TABLES
from checkpoints.run_folder import METRICS
from train.config.checks import check
from train.config.hydra_app import compose
from train.config.schema import Config

ROOT = Path(__file__).parents[2]


def committed() -> dict[str, Any]:
    return {study: command.read_figures(ROOT / "docs" / command.RESULTS, study) for study in load_settings().studies}


def test_committed_pages_are_current() -> None:
    studies = committed()
    for page in (ROOT / "docs" / command.PAGE, ROOT / "docs" / command.TARGETS, ROOT / "README.md"):
        text = page.read_text()
        assert command.fill_page(text, studies) == text, f"{page}: outdated: make results RESULTS_ARGS=--page-only"
    text = "".join((ROOT / "docs" / page).read_text() for page in (command.PAGE, command.TARGETS))
    assert all(f"<!-- table: {name} -->" in text for name in (*TABLES, "claims", "real_claims"))
    assert all(f"`make results-{study}`" in text for study in studies)


def test_committed_figures_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make results` measures nothing after a rename of keys or settings."""
    monkeypatch.chdir(ROOT)
    settings = load_settings()
    lab = Lab(settings, ROOT / "docs" / command.RESULTS)
    for study, measurements in settings.studies.items():
        kept = read_measurements(lab.folder, study)
        for name, given in measurements.items():
            assert kept[name]["inputs"] == digest(lab.inputs({**settings.defaults, **given})), f"{study}: {name}"


def test_a_claim_depends_on_its_figures() -> None:
    studies = committed()
    claim = "| SpecVLM: acceptance grows with every epoch, `eagle_qwen` |"
    assert f"{claim} yes | 3.42, 4.09" in claims(studies)
    studies["epochs"]["eagle_qwen"]["tokens_per_target_pass"][0] = 5.0
    assert f"{claim} **no** | 5.00, 4.09" in claims(studies)


@pytest.mark.slow
def test_every_run_composes_and_is_used() -> None:
    settings = load_settings()
    for name in settings.runs:
        config = compose("config", [*settings.arguments(name), "run.dir=somewhere"], Config)
        if config.data.name != "real":  # whose model is not built
            check(config)
        assert Path(settings.targets[settings.target_of(name)]).name == config.target.name
    assert {run for study in settings.studies.values() for spec in study.values() for run in runs_of(spec)} == set(
        settings.runs
    )


@pytest.fixture(scope="module")
def tiny_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings with a random target, an untrained draft in the layout of a run, and a measurement of each kind but vllm."""
    where = tmp_path_factory.mktemp("results")
    path = make_target(where, "qwen2_5_vl")
    content = {
        "runs_dir": str(where / "runs"),
        "docs_dir": str(where / "docs"),
        "defaults": {"kind": "compare", "families": ["caption"], "prompts": 2, "warmup_prompts": 1, "repeats": 1}
        | {"threads": 1, "max_new_tokens": 10, "passes": "eager", "target": "qwen", "run": "eagle"},
        "targets": {"qwen": str(path)},
        "common": "",
        "runs": {"eagle": "qwen draft=eagle"},
        "on_request": [],
        "studies": {
            "headline": {
                "qwen": {"decoders": {"chain": {"policy": "chain"}, "pruned": {"policy": "sage", "pruning": 0.5}}},
                "int8": {"quantize": "int8", "is_dense": True, "decoders": {"x": {"policy": "chain"}}}
                | {"prompts_file": "prompts.jsonl"},
                "wide": {"megabytes": 4, "sampling": {"temperature": 1.0}, "decoders": {"x": {"policy": "cost_aware"}}}
                | {"prompts_file": "prompts.jsonl"},
            },
            "confidence": {"qwen": {"kind": "confidence"}},
            "epochs": {"eagle": {"kind": "epochs", "policy": "static"}},
            "tokens": {"eagle": {"kind": "tokens"}},
        },
    }
    talks = [{"id": f"set-{i}", "messages": [{"role": "user", "content": "Hello"}]} for i in range(3)]
    path.with_name("prompts.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks), encoding="utf-8")
    (where / "tiny.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    settings = load_settings(where / "tiny.yaml")
    target = sage.load_target(path, dtype=torch.float32)
    sage.new_draft(target, "eagle", seed=0).save_pretrained(settings.folder("eagle") / runs.DRAFT)
    folder = settings.folder("eagle")
    lines = ""  # of the metrics, and two validations
    for step, tokens in enumerate((1.5, 2.0), start=1):
        lines += (
            json.dumps({"step": step, "time_s": step, "tokens": 100 * step, "estimated_tokens_per_pass": 1.0 + step}) + "\n"
        )
        report = folder / "validation" / f"step_{step:08d}" / "report.json"
        report.parent.mkdir(parents=True)
        content = {"schema": 1, "prompts": 2, "policies": {"static": {"tokens_per_target_pass": tokens}}}
        report.write_text(json.dumps(content), encoding="utf-8")
    (folder / METRICS).write_text(lines, encoding="utf-8")
    (folder / runs.MARKER).write_text(settings.run_digest("eagle"), encoding="utf-8")
    return where


@pytest.mark.slow
def test_each_kind_is_measured_once(tiny_world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(tiny_world / "tiny.yaml")
    folder = tiny_world / "figures"
    for study in settings.studies:
        Lab(settings, folder).measure(study)
    found = {study: command.read_figures(folder, study) for study in settings.studies}
    narrow, wide, int8 = (found["headline"][name]["decoders"] for name in ("qwen", "wide", "int8"))
    assert all(part["match"] == part["total"] == 2 for part in (*narrow.values(), wide["x"], int8["x"]))
    assert 0.9 < found["headline"]["int8"]["same_tokens"] <= 1
    assert narrow["pruned"]["draft_context"] < narrow["chain"]["draft_context"]
    assert set(found["confidence"]["qwen"]) >= {"prompts", "between_rounds"}
    assert found["epochs"]["eagle"]["tokens_per_target_pass"] == [1.5, 2.0]
    assert found["headline"]["wide"]["sources"]["set"]["x"]["prompts"] == 2
    assert found["tokens"]["eagle"] == {"100": 2.0, "200": 3.0}
    monkeypatch.setattr(Lab, "_measure", lambda *_: pytest.fail("measured again"))
    for study in settings.studies:
        Lab(settings, folder).measure(study)
    settings.studies["epochs"]["eagle"]["policy"] = "chain"
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        Lab(settings, folder).measure("epochs")


def test_the_random_target_is_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published, settings = tmp_path / "published", load_settings()
    LlamaConfig(**text_sizes()).save_pretrained(published)
    (published / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("benchmarks.text_target.build_target", lambda: published)
    settings.runs_dir = str(tmp_path / "runs")
    folder = Path(settings.target_folder("random"))
    model = LlamaForCausalLM.from_pretrained(folder)
    assert (folder / "tokenizer.json").is_file() and model.lm_head.weight is not model.model.embed_tokens.weight
    assert (model.config.hidden_size, model.config.vocab_size) == (256, text_sizes()["vocab_size"])
    monkeypatch.setattr("benchmarks.text_target.build_target", lambda: pytest.fail("drawn again"))
    assert settings.target_folder("random") == str(folder)


def test_correlation_against_numpy() -> None:
    draw = random.Random(0)
    series = [[draw.random() for _ in range(length)] for length in (9, 4, 1)]
    first = [value for one in series for value in one[:-2]]
    second = [value for one in series for value in one[2:]]
    assert correlation(series, series, 2) == pytest.approx(numpy.corrcoef(first, second)[0, 1], abs=1e-12)
    assert correlation([[1.0, 1.0]], [[1.0, 1.0]], 1) is None

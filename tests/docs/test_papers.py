"""`python -m benchmarks.papers`: every study end to end on random targets, and the page rendered from figures."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from support.messages import check_message, refused
from support.papers_helpers import tiny_world
from support.shortcuts import save_rendered

from benchmarks.papers import __main__ as command
from benchmarks.papers import render, runs, tuning
from benchmarks.papers.figures import FIGURES_DIR, FigureStore, digest
from benchmarks.papers.lab import Lab
from benchmarks.papers.markdown import fill
from benchmarks.papers.runs import load_settings
from benchmarks.papers.studies import (
    SECTIONS,
    STUDIES,
    ablations,
    confidence,
    drafts,
    epochs,
    projection,
    regimes,
    select_studies,
)
from checkpoints.run_folder import METRICS
from sage.bench.costs import measure_shape_costs
from sage.bench.shapes import Shape
from sage.costs.tables import Costs, Curve
from sage.replay.recording import RecordedRound, Recording
from sage.trees.sage import confidence_of
from train.config.checks import check
from train.config.hydra_app import compose
from train.config.schema import Config
from train.report import style

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs every study once; returns the folder of settings, runs and docs. The large shape is narrow."""
    where = tmp_path_factory.mktemp("results")
    settings = tiny_world(where)
    (where / "README.md").write_text(f"first\n{render.README_START}\nold\n{render.README_END}\nlast\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "save", save_rendered)
        patch.setattr(projection, "measure_shape_costs", lambda shape, *rest: measure_shape_costs(narrow(shape), *rest))
        assert command.main(["--quick", "--settings", str(settings)]) == 0
    return where


def narrow(shape: Shape) -> Shape:
    return replace(shape, hidden_size=256, intermediate_size=512, num_heads=2, num_kv_heads=1, vocab_size=2000)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads, which a lab sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_every_study_has_a_section_with_plots(measured: Path) -> None:
    text = (measured / "docs" / "results.md").read_text()
    assert set(SECTIONS) == set(STUDIES)
    assert not list((measured / "docs" / FIGURES_DIR).glob("engines*")), "vLLM is not installed here"
    for number, study in enumerate((name for name in SECTIONS if name != "engines"), start=1):
        assert f"\n## {number}. " in text
        assert f"`make results-{study}`" in text
        for file in STUDIES[study].plots:
            assert (measured / "docs" / FIGURES_DIR / file).stat().st_size > 5000
            assert f"({FIGURES_DIR}/{file})" in text
    assert "nan" not in text and "None" not in text and not re.search(r"[{}]|<!-- (each|end)", text)
    assert "\n## Expectations\n" in text


@pytest.mark.slow
def test_page_depends_on_the_figures_only(measured: Path) -> None:
    files = FigureStore(measured / "docs" / FIGURES_DIR).read_all()
    text = (measured / "docs" / "results.md").read_text()
    assert render.render(files) == text
    files["policies_qwen"]["figures"]["policies"]["sage"]["tokens_per_target_pass"] += 1
    assert render.render(files) != text


def test_committed_page_and_readme_are_current() -> None:
    docs, readme = ROOT / "docs", (ROOT / "README.md").read_text()
    files = FigureStore(docs / FIGURES_DIR).read_all()
    assert render.render(files) == (docs / "results.md").read_text(), "outdated: make results RESULTS_ARGS=--page-only"
    assert render.ENGINES_START in readme
    assert render.with_headline(readme, {name: content["figures"] for name, content in files.items()}) == readme


def test_committed_figures_are_current(monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    """`make results` measures nothing after a rename of keys or settings."""
    store = FigureStore(ROOT / "docs" / FIGURES_DIR)
    monkeypatch.chdir(ROOT)

    def get(name: str, inputs: Any, *_: Any) -> Any:
        content = store.read(name)
        assert content is not None and content["inputs"] == digest(inputs), name
        return content["figures"]

    monkeypatch.setattr(store, "get_or_measure", get)
    lab = Lab(load_settings(), store)
    for study in STUDIES.values():
        study.measure(lab)


def test_figures_depend_on_their_runs_targets_and_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, threads: None
) -> None:
    monkeypatch.chdir(ROOT)
    settings = load_settings()
    inputs: dict[str, Any] = {}
    store = FigureStore(tmp_path)
    monkeypatch.setattr(store, "get_or_measure", lambda name, found, *_: inputs.setdefault(name, found))
    for settings.passes in ("eager", "compiled"):
        Lab(settings, store).figures("policies", settings.passes, dict, ["eagle_qwen"])
    assert inputs["compiled"] == inputs["eager"] | {"passes": "compiled"}
    assert inputs["eager"]["targets"] == {"qwen": runs.weights_digest(settings.targets["qwen"])}


@pytest.mark.slow
def test_headline_is_written_between_the_markers_of_the_readme(measured: Path) -> None:
    text = (measured / "README.md").read_text()
    assert text.startswith("first\n") and text.endswith("\nlast\n") and "old" not in text
    assert "**`cost_aware`**" in text


@pytest.mark.slow
def test_sections_name_their_machine_if_there_are_several(measured: Path) -> None:
    files = FigureStore(measured / "docs" / FIGURES_DIR).read_all()
    assert "on machine" not in render.render(files)
    files["length"]["machine"]["cpu"] = "another"
    files["policies_llava"]["machine"]["cpu"] = "another"
    text = render.render(files)
    numbers = {line[0] for line in text.splitlines() if re.match(r"\d\. Linux", line)}
    assert numbers == {"1", "2"}
    machines = {study: re.findall(rf"`make results-{study}`.*, on (.*?)\. Figures", text) for study in ("length", "policies")}
    assert machines["policies"] == ["machines 1 and 2"] and machines["length"][0] in ("machine 1", "machine 2")


@pytest.mark.slow
def test_current_figures_are_not_measured_again(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.stat().st_mtime_ns for path in (measured / "docs" / FIGURES_DIR).glob("*.json")}
    made: list[str] = []
    monkeypatch.setattr(command, "write_page", lambda files, docs: docs)
    monkeypatch.setattr("benchmarks.papers.figures.round_floats", lambda figures: made.append("measured") or figures)
    assert command.main(["--quick", "--settings", str(measured / "tiny.yaml")]) == 0
    assert not made
    assert {path: path.stat().st_mtime_ns for path in (measured / "docs" / FIGURES_DIR).glob("*.json")} == before


def test_figures_are_measured_again_when_their_inputs_change(tmp_path: Path) -> None:
    store = FigureStore(tmp_path)
    assert store.get_or_measure("one", {"prompts": 1}, lambda: {"value": 1 / 3}, "make results-x") == {"value": 0.33333}
    assert store.get_or_measure("one", {"prompts": 1}, lambda: {"value": 2.0}, "make results-x") == {"value": 0.33333}
    assert store.get_or_measure("one", {"prompts": 2}, lambda: {"value": 2.0}, "make results-x") == {"value": 2.0}
    stored = json.loads((tmp_path / "one.json").read_text())
    assert stored["command"] == "make results-x" and stored["machine"]["cores"] >= 1
    (tmp_path / "one.json").write_text("{")
    with refused("one.json", "not JSON", "delete"):
        store.read("one")


def test_run_is_trained_again_when_its_overrides_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings()
    settings.runs_dir = str(tmp_path)
    trained: list[list[str]] = []
    monkeypatch.setattr(runs.subprocess, "run", lambda words, **_: trained.append(words) or _made(words))
    folder = runs.ensure_trained(settings, "eagle_qwen")
    assert runs.is_trained(settings, "eagle_qwen") and len(trained) == 1
    runs.ensure_trained(settings, "eagle_qwen")
    assert len(trained) == 1
    settings.training.runs["eagle_qwen"].overrides.append("optim.lr=1e-3")
    runs.ensure_trained(settings, "eagle_qwen")
    assert len(trained) == 2 and f"run.dir={folder}" in trained[1]


def _made(words: list[str]) -> SimpleNamespace:
    Path(words[-1].removeprefix("run.dir=")).mkdir()
    return SimpleNamespace(returncode=0)


def test_failed_training_run_skips_only_its_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fails(lab: Any) -> None:
        raise runs.TrainingFailed("sage-train ended with exit code 2")

    done: list[str] = []
    studies = {"policies": fails, "epochs": lambda lab: done.append("epochs")}
    made = [replace(STUDIES[name], measure=measure) for name, measure in studies.items()]
    monkeypatch.setattr(command, "select_studies", lambda names: made)
    (tmp_path / "where.yaml").write_text(f"docs_dir: {tmp_path}/docs\n")
    assert command.main(["policies", "epochs", "--settings", str(tmp_path / "where.yaml")]) == 1
    assert done == ["epochs"]
    check_message(capsys.readouterr().err, "training run failed", "policies")


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with refused("tables", "policies, "):
        select_studies(["tables"])
    assert select_studies(["entropy", "policies"]) == [STUDIES["policies"], STUDIES["entropy"]]
    for text, parts in {
        "tabel: {prompts: 1}": ["tabel"],
        "pruning: {ratio: [0.5]}": ["pruning.ratio", "ratios"],
        "pruning: {ratios: 0.5}": ["pruning.ratios", "0.5", "list"],
    }.items():
        (tmp_path / "bad.yaml").write_text(text)
        with refused("bad.yaml", *parts):
            load_settings(tmp_path / "bad.yaml")
    with refused("training.runs", "'other'", "eagle_qwen, "):
        runs.overrides(load_settings(), "other")
    with refused("placeholder", "number"):
        fill("temperature", {})


@pytest.mark.slow
def test_every_run_in_the_settings_composes() -> None:
    """Composes each command line of full.yaml with Hydra."""
    settings = load_settings()
    matched = set(runs.matched_runs(settings))
    listed = set(settings.training.runs) - matched
    for name in listed:
        check(compose("config", [*runs.overrides(settings, name), "run.dir=somewhere"], Config))
    named = [*settings.main_runs.values(), *settings.assistant_runs.values()]
    named += [name for study in ("epochs", "compressor", "anchors") for name in settings.sizes[study]["runs"]]
    named += [settings.sizes["regimes"]["run"], *settings.sizes["regimes"]["drafts"]]
    named += [name for part in settings.sizes["drafts"]["parts"] for name in part.get("runs", {}).values()]
    for engines in (settings.sizes["engines"], settings.sizes["regimes"]["engines"]):
        named += [name for drafts in engines["runs"].values() for name in drafts.values()]
    assert set(named) - matched == listed
    part = {"target": "llava", "budget": "steps", "seed": 3}
    settings.sizes["drafts"]["parts"] = [part, {**part, "budget": "muon", "drafts": ["eagle", "block"]}]
    drafts = runs.matched_runs(settings)
    assert [name for name in drafts if "muon" in name] == ["eagle_llava_550_muon_3", "block_llava_465_muon_3"]
    for name, run in drafts.items():
        settings.training.runs[name] = run
        config = compose("config", [*runs.overrides(settings, name), "run.dir=somewhere"], Config)
        assert (config.seed, config.target.name) == (3, "pocket_llava_onevision")
        assert (config.optim.kind == "muon") is ("muon" in name)


# -- computations ----------------------------------------------------------------------------------------------------------


def recording(answer: list[int], rounds: list[tuple[int, dict[tuple[int, ...], list[int]]]]) -> Recording:
    """Returns a recording whose candidates have decreasing probabilities."""
    recorded = []
    for position, proposed in rounds:
        probs = {
            path: (torch.tensor([0.6, 0.3, 0.1][: len(tokens)]), torch.tensor(tokens)) for path, tokens in proposed.items()
        }
        recorded.append(RecordedRound(position, probs))
    return Recording(prompt_tokens=5, max_new_tokens=20, vocabulary=50, tokens=answer, rounds=recorded)


ANSWER = recording(
    [7, 8, 9, 10, 11],
    [(1, {(): [8, 3], (8,): [4, 9], (8, 9): [1, 2]}), (4, {(): [2, 11]})],
)


def test_most_frequent_paths() -> None:
    """Round 1 goes 8 (rank 0), 9 (rank 1), then 10 is no candidate; round 2 takes 11 (rank 1)."""
    assert tuning.most_frequent_paths([ANSWER], [1, 3]) == [[[0]], [[0], [1], [0, 1]]]


def test_nodes_on_path() -> None:
    found = [(one.depth, one.is_accepted) for one in confidence.nodes_on_path(ANSWER, "p", 2)]
    assert found == [(1, True), (2, False), (3, False), (1, False)]


def test_oracle_against_brute_force() -> None:
    costs = Costs(Curve([1, 2, 3], [1.0, 1.1, 1.6]), Curve([1, 2], [0.2, 0.3]), 5, overhead=0.1)
    reach, left = [2, 1], [4, 1]
    best = 0.0
    for depths in itertools.product(range(3), range(2)):
        tokens = sum(min(depth + 1, most) for depth, most in zip(depths, left, strict=True))
        seconds = sum(costs.verify_s(depth + 1, 5) + depth * costs.draft(1) + costs.overhead for depth in depths)
        best = max(best, tokens / seconds)
    found = ablations.oracle([ANSWER], costs, 12)
    assert found["tokens_per_s"] == pytest.approx(best, rel=1e-9)
    assert [tuning.depth_on_path(ANSWER, one) for one in ANSWER.rounds] == reach


def test_auc_and_correlation_against_naive_versions() -> None:
    draw = random.Random(0)
    predicted = [draw.choice([0.1, 0.2, 0.5, 0.9]) for _ in range(60)]
    outcomes = [draw.random() < value for value in predicted]
    pairs = [(a, b) for a, hit in zip(predicted, outcomes, strict=True) if hit for b in _refused(predicted, outcomes)]
    naive = sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)
    assert confidence.auc(predicted, outcomes) == pytest.approx(naive, abs=1e-12)
    assert confidence.auc([0.3, 0.4], [True, True]) == 0.5
    series = [[draw.random() for _ in range(length)] for length in (9, 4, 1)]
    first = [value for one in series for value in one[:-2]]
    second = [value for one in series for value in one[2:]]
    assert confidence.correlation(series, series, 2) == pytest.approx(numpy.corrcoef(first, second)[0, 1], abs=1e-12)
    assert confidence.correlation([[1.0, 1.0]], [[1.0, 1.0]], 1) is None
    shorter = [*series, [1.0]]  # than the lag: it has nothing to add
    assert confidence.correlation(shorter, shorter, 2) == confidence.correlation(series, series, 2)


def _refused(predicted: list[float], outcomes: list[bool]) -> list[float]:
    return [value for value, hit in zip(predicted, outcomes, strict=True) if not hit]


def test_lemma_fails_for_a_tie_and_holds_for_a_certain_token() -> None:
    """p = (.5, .5, 0, ...) with k = 10 has alpha 0.699 and a claimed bound of 0.729."""
    tie, certain = [0.5, 0.5, *[0.0] * 8], [1.0, *[0.0] * 9]
    assert confidence_of(tie) == pytest.approx(0.699, abs=5e-4)
    assert confidence.bound(confidence_of(tie), 10) == pytest.approx(0.729, abs=5e-4)
    found = confidence.lemma([confidence.PathNode("p", 1, tie, False), confidence.PathNode("p", 2, certain, True)])
    assert (found["below_bound"], found["above_threshold"], found["above_threshold_accepted"]) == (1, 2, 1)
    assert found["examples"][0]["probs"][:2] == [0.5, 0.5]


def test_assumed_costs_are_not_updated() -> None:
    policy = ablations.AssumedCosts(0.004)
    assert policy.costs is not None
    assert policy.costs.verify(1) == policy.costs.verify(60) == 0.004
    assert policy.costs.draft(8) == pytest.approx(0.0004)


# -- expectations ---------------------------------------------------------------------------------------------------------


def test_expectations_depend_on_the_figures() -> None:
    rising, falling = ([{"epoch": n, "policies": {"static": {"tokens_per_target_pass": v}}} for n, v in enumerate(curve)]
                       for curve in ((2.0, 3.0), (3.0, 2.5)))  # fmt: skip
    runs_of = {"a": {"points": rising, "prompts": 8}, "b": {"points": falling, "prompts": 8}}
    first, second = epochs.STUDY.expectations({"runs": runs_of})
    assert first.is_met and not second.is_met
    assert "-0.50" in second.evidence


def test_host_overhead_of_our_policies_and_of_all() -> None:
    def found(ours: float, others: float) -> list[bool]:
        shares = {"acceptance": 0.01, "cache commit": 0.0, "policy and tree": 0.05, "other": 0.0}
        rows = {"sage": 0.04, "cost_aware": ours, "eagle2": others}
        policies = {name: {"shares": {**shares, "host overhead": share}} for name, share in rows.items()}
        return [one.is_met for one in projection.measured_overhead("qwen", policies)]

    assert found(0.05, 0.05) == [True, True]
    assert found(0.05, 0.051) == [True, False]
    assert found(0.051, 0.01) == [False, False]


@pytest.mark.slow
def test_slow_policy_is_explained_by_its_rounds(measured: Path) -> None:
    found = {name: one["figures"] for name, one in FigureStore(measured / "docs" / FIGURES_DIR).read_all().items()}
    figures = found["policies_qwen"]
    captions = figures["by_family"]["caption"]["policies"]["cost_aware"]
    claim = "pocket Qwen2.5-VL: `cost_aware` at least 2.00x on captions"
    for speedup, is_met in ((1.9, False), (2.1, True)):
        captions["speedup"] = speedup
        study = STUDIES["policies"]
        [one] = [one for one in study.expectations(study.select(found)) if one.claim == claim]
        assert one.is_met is is_met
        assert ("tokens per round of" in one.evidence) is not is_met


@pytest.mark.slow
def test_sizes_are_compared_with_goals_with_vllm_and_with_the_projection(measured: Path) -> None:
    files = FigureStore(measured / "docs" / FIGURES_DIR).read_all()
    assert "Beside vLLM" not in render.render(files)
    small, large = (files[f"regimes_{megabytes}"]["figures"] for megabytes in (4, 8))
    assert (small["mlp"], large["mlp"]) == (512, 1536) and large["weights_mb"] > 2 * small["weights_mb"]
    assert small["ratio_of_bytes"] > 2 * large["ratio_of_bytes"] and large["bandwidth"] == small["bandwidth"]
    tokens = [{name: part["policies"][name]["tokens"] for name in part["policies"]} for part in (small, large)]
    assert tokens[0] == tokens[1], "the same texts at both sizes"
    decoders = {
        name: {"tokens_per_s": 10.0, "first_token_ms": 5.0} for name in ("autoregressive", "chain, eagle3", "vllm 1 tokens")
    }
    decoders["vllm"] = {"tokens_per_s": 20.0, "first_token_ms": 4.0}
    ratio = {"ratio": 0.5, "range": [0.4, 0.6]}
    pairs = {"autoregressive": ("autoregressive", "vllm"), "same draft": ("chain, eagle3", "vllm 1 tokens")}
    pairs["any draft"] = pairs["same draft"]
    beside = {"ratios": {name: {"ours": one, "theirs": other, **ratio} for name, (one, other) in pairs.items()}}
    files["vllm_8"] = {**files["regimes_8"], "figures": {"engine": {"vllm": "0.32.0"}, "decoders": decoders, **beside}}
    large["megabytes"], large["policies"]["cost_aware"]["speedup"] = 62, 2.55
    large["projected"] = {name: part["speedup"] for name, part in large["policies"].items()}
    text = render.render(files)
    assert "Beside vLLM 0.32.0" in text and "| 5.0 ms | 4.0 ms | 10 | 20 | 0.50x (0.40-0.60) |" in text
    study = STUDIES["regimes"]
    found = {one.claim.partition(": ")[2]: one for one in study.expectations(study.select(render._figures(files)))}
    assert found["`cost_aware` at least 2.50x"].is_met and not found["any draft at least 3 times vLLM's speed"].is_met
    assert not found["first token no later than vLLM's"].is_met
    assert not found["autoregressive at least 2 times vLLM's speed"].is_met


@pytest.mark.slow
def test_drafts_are_compared_with_their_goals_and_over_seeds(measured: Path) -> None:
    files = FigureStore(measured / "docs" / FIGURES_DIR).read_all()
    narrow, wide = (files[f"drafts_qwen{own}_time_0"]["figures"] for own in ("", "8_threads1"))
    assert narrow["tokens"]["match"] == narrow["tokens"]["total"] == 12, "texts of 6 drafts under two policies"
    assert not wide["tokens"] and set(wide["speed"]) == set(narrow["heads"])
    assert [part["speed"]["block"]["total"] for part in (narrow, wide)] == [1, 2], "prompts of a part"
    second = json.loads(json.dumps(files["drafts_qwen_time_0"]))
    files["drafts_qwen_time_1"], own = second, second["figures"] | {"seed": 1}
    second["figures"] = own
    for seed, figures in enumerate((narrow, own)):
        for head in figures["heads"]:
            tokens = {"eagle": 3.0, "block": 3.25 + seed}.get(head, 2.0)
            chain = figures["tokens"]["heads"][head]["chain"]["2"]
            chain["tokens"] = tokens
            chain["over"]["ratio"] = figures["speed"][head]["over"]["ratio"] = tokens / 3
    eager = {key: value for key, value in wide.items() if key not in ("megabytes", "threads")} | {"passes": "eager"}
    files["drafts_qwen_eager_time_0"] = second | {"figures": eager}
    few = json.loads(json.dumps(narrow)) | {"budget": "long"}
    for kept in (few["heads"], few["tokens"]["heads"], few["speed"], *few["speed_by_family"].values()):
        for head in set(kept) - {"eagle", "block"}:
            del kept[head]
    files["drafts_qwen_long_0"] = second | {"figures": few}
    study = STUDIES["drafts"]
    claims = {one.claim: one for one in study.expectations(study.select(render._figures(files)))}
    title = "pocket Qwen2.5-VL, equal training time"
    level = claims[f"{title}: the best one-pass head at least level with `eagle` in tokens per pass of a chain"]
    assert level.is_met and level.evidence == "`block` 3.75, `eagle` 3.00: 1.25x (1.08-1.42), range over seeds"
    fast = f"{title}: the fastest one-pass head at least 1.15 times as fast as `eagle` under `cost_aware`"
    assert claims[fast].is_met and claims[fast].evidence == "`block`: 1.25x (1.08-1.42), range over seeds"
    assert claims[fast.replace("time:", "time, eager passes:")].evidence.endswith("95% interval")
    assert not claims[fast.replace("equal training time", "equal time, longer training")].is_met
    text = render.render(files)
    assert "| 3.75 (3.25-4.25) |" in text and "Seeds 0, 1." in text and "| 1.25x (1.08-1.42) |" in text


def test_a_part_of_the_drafts_may_have_passes_of_another_mode(tmp_path: Path) -> None:
    lab = Lab(load_settings(), FigureStore(tmp_path))
    part = {"target": "qwen", "budget": "time", "seed": 0}
    assert drafts._lab_of(lab, part) is lab
    assert drafts._lab_of(lab, part | {"passes": "eager"}).settings.passes == "eager" != lab.settings.passes
    assert drafts.part_name(part | {"passes": "eager"}) == "drafts_qwen_eager_time_0"
    assert drafts.part_name(part | {"threads": 2}) == "drafts_qwen_threads2_time_0"
    assert drafts.Group.of(part | {"threads": 2}).title == "qwen, equal training time, 2 threads"


def test_a_part_of_the_drafts_may_name_its_runs(tmp_path: Path) -> None:
    named = {"eagle": "eagle_long", "block": "block_long"}
    settings = load_settings()
    assert drafts._runs(Lab(settings, FigureStore(tmp_path)), {"target": "qwen", "runs": named}) == named
    settings.sizes["drafts"]["parts"] = [{"target": "qwen", "budget": "long", "seed": 0, "runs": named}]
    assert runs.matched_runs(settings) == {}
    assert [drafts._is_one_pass(head) for head in ("block", "block_12", "eagle")] == [True, True, False]


def test_training_times_leave_interruptions_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps of two seconds each, one of them interrupted for a minute."""
    monkeypatch.setattr(runs, "ensure_trained", lambda settings, name: tmp_path)
    lines = [{"step": step, "tokens": 9, "time_s": 2.0 * step + 60 * (step > 6)} for step in range(2, 11, 2)]
    (tmp_path / METRICS).write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert runs.training_of(load_settings(), "eagle_qwen")["training_s"] == pytest.approx(20.0)


@pytest.mark.slow
def test_anchors_are_compared_with_all_positions(measured: Path) -> None:
    files = FigureStore(measured / "docs" / FIGURES_DIR).read_all()
    found = files["anchors"]["figures"]
    assert found["match"] == found["total"] == 2 and list(found["runs"]) == ["eagle_qwen", "eagle3_qwen"]
    chain = found["runs"]["eagle3_qwen"]["chain"]["2"]
    chain["tokens"], chain["over"] = 2.5, {"ratio": 1.25, "ci": [1.1, 1.4]}
    study = STUDIES["anchors"]
    (claim,) = study.expectations(study.select(render._figures(files)))
    assert claim.is_met and claim.evidence.startswith("2.50 and ")
    assert claim.evidence.endswith("tokens per pass, 1.25x (1.10-1.40)")
    assert "| 2.50 | 1.25x | 1.10-1.40 |" in render.render(files)


def test_ratio_of_a_large_target_by_hand() -> None:
    """Qwen2.5-VL-7B: 28 layers of width 3584 with 28 + 4 heads of 128 and an MLP of 18944; a vocabulary of 152064."""
    layer, head = 2 * 3584 * 128 * (28 + 4) + 3 * 3584 * 18944, 152064 * 3584
    assert regimes.ratio_of_large() == pytest.approx((layer + 2 * 3584**2 + head) / (28 * layer + head))

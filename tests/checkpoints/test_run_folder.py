"""The run folder: names, readers, the validation score, which validation belongs to which draft; the description of folders."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.export_helpers import REDUCED, edit_json, export_draft, policy_figures, save_run, save_target
from support.messages import check_message, refused
from support.train_helpers import ROOT

from checkpoints import run_folder
from checkpoints.export.exporter import find_source, with_report
from checkpoints.export.importer import convert
from checkpoints.inspect import inspect_folder
from checkpoints.run_folder import LOCK, is_locked, locked_run, score


def report(*names: str, metric: str = "tokens_per_target_pass") -> dict[str, Any]:
    return {"policies": {name: {metric: float(i), "first_gaps": []} for i, name in enumerate(names)}}


def test_score_is_that_of_sage_or_of_the_first_drafting_policy() -> None:
    assert score(report("autoregressive", "static", "sage")) == 2.0
    assert score(report("autoregressive", "static", "chain")) == 1.0
    assert score(report("autoregressive")) is None
    assert score(report("sage", "static", "chain"), policy="chain") == 2.0
    assert score(report("sage", "static"), policy="chain") == 0.0  # not measured: as if no policy was chosen
    assert score(report("static", "sage", metric="speedup"), "speedup", "sage") == 1.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose best draft, by the speedup of `chain`, is of step 200; `sage` has the most tokens per pass at step 100."""
    run = save_run(tmp_path / "run", save_target(tmp_path / "target"), {100: 2.5, 200: 2.25, 300: 2.0})
    for step, speedup in ((100, 1.0), (200, 1.9), (300, 1.5)):
        chain = policy_figures(1.5) | {"speedup": speedup}
        path = run_folder.validation_folder(run, step) / "report.json"
        edit_json(path, lambda content, chain=chain: content["policies"].update(chain=chain))
    with (run / "config.yaml").open("a", encoding="utf-8") as file:
        file.write("score: {metric: speedup, policy: chain}\n")
    edit_json_manifest(run / "draft_best", 200)
    return run


def edit_json_manifest(draft: Path, step: int) -> None:
    path = draft / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": step}, indent=1) + "\n")


def test_step_and_report_of_the_best_draft_are_those_of_its_manifest(run: Path) -> None:
    source = find_source(run)
    assert (source.draft.name, source.step) == ("draft_best", 200)
    assert source.report is not None and source.report["policies"]["chain"]["speedup"] == 1.9
    found = inspect_folder(run / "draft_best")
    assert found.facts["steps trained"] == 200 and found.table["sage"]["tokens_per_target_pass"] == 2.25
    assert find_source(run / "draft").step == 300
    assert inspect_folder(run).facts["steps trained"] == 300


def test_a_draft_saved_after_the_last_validation_has_no_report(run: Path) -> None:
    edit_json_manifest(run / "draft", 350)
    source = find_source(run / "draft")
    assert (source.step, source.report) == (350, None)


def test_a_later_check_replaces_no_measurement(run: Path, tmp_path: Path) -> None:
    own = run_folder.validation_folder(run, 200) / "report.json"
    checks = []
    for prompts in (3, 5):
        checks.append(run_folder.next_check(run, "draft_best", 200))
        checks[-1].mkdir(parents=True)
        edited = json.loads(own.read_text()) | {"prompts": prompts, "step": 200}
        (checks[-1] / "report.json").write_text(json.dumps(edited))
    assert [check.name for check in checks] == ["draft_best_step_00000200", "draft_best_step_00000200_2"]
    assert run_folder.list_checks(run) == checks and not run_folder.is_check(run / "validation" / "step_00000200")
    source = find_source(run)
    assert source.report is not None and source.report["prompts"] == 4
    assert inspect_folder(run / "draft_best").measured_with.startswith("4 prompts")
    for path, prompts in ((checks[0], 3), (checks[1] / "report.json", 5)):
        chosen = with_report(source, path).report
        assert chosen is not None and chosen["prompts"] == prompts
    with refused(str(checks[0]), "200", "300"):
        with_report(find_source(run / "draft"), checks[0])
    with refused(str(tmp_path / "none")):
        with_report(source, tmp_path / "none")


def test_unreadable_files_are_named(run: Path) -> None:
    path = run_folder.validation_folder(run, 100) / "report.json"
    path.write_text("{")
    with refused(str(path)):
        run_folder.read_reports(run)
    (run / "config.yaml").write_text("a: [")
    with refused(str(run / "config.yaml")):
        run_folder.read_run_config(run)


# -- `sage-export --inspect` --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    save_run(folder / "run", save_target(folder / "target"), {100: 2.5, 200: 2.25}, vocabulary=REDUCED)
    export_draft(folder / "run", folder / "export")
    convert(folder / "export", str(folder / "target"), folder / "back")
    return folder


def test_export_and_import(home: Path) -> None:
    for name, kind in (("export", "export"), ("back", "draft")):
        found = inspect_folder(home / name)
        assert (found.kind, found.is_intact) == (kind, True)
        assert found.facts["steps trained"] == 100
        assert found.facts["data fingerprint"] == "f00d"
        assert found.facts["parameters"] == "16,416"
        assert found.table["sage"]["speedup"] == 1.75
    assert inspect_folder(home / "export").facts["format"] == "eagle3"
    assert inspect_folder(home / "back").facts["imported from"] == str(home / "export")
    json.dumps(inspect_folder(home / "export").to_dict())


def test_state_target_and_unknown_folder(home: Path, tmp_path: Path) -> None:
    state = inspect_folder(home / "run" / "state" / "step_00000200")
    assert (state.kind, state.facts["steps trained"], state.is_intact) == ("training state of a run", 200, True)
    assert inspect_folder(home / "target").kind.startswith("target")
    assert state.facts["target"].startswith(str(home / "target"))
    unknown = inspect_folder(tmp_path)
    assert (unknown.kind, unknown.is_intact) == ("unknown", False)
    assert unknown.text().splitlines()[0] == f"{tmp_path}: unknown"
    around = inspect_folder(home)
    assert (around.kind, around.facts["run"], around.facts["export"]) == ("unknown", "run", "export")
    with refused("--inspect", "provenance.json", "give its folder"):
        inspect_folder(home / "run" / "provenance.json")


def test_third_party_draft(home: Path, tmp_path: Path) -> None:
    out = export_draft(home / "run", tmp_path / "theirs").folder
    for name in ("manifest.json", "sage_export.json"):
        (out / name).unlink()
    found = inspect_folder(out)
    assert (found.kind, found.facts["format"], found.is_intact) == ("third-party draft", "eagle3", True)
    (out / "model.safetensors").write_bytes(b"")
    check_message(inspect_folder(out).problems[0], "model.safetensors", "corrupt")


def test_corrupt_files_are_named(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    run = save_run(tmp_path / "run", target, {100: 2.0})
    out = export_draft(run, tmp_path / "out").folder
    path = out / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    found = inspect_folder(out)
    assert "CORRUPT" in found.text()
    assert "model.safetensors: corrupt" in found.problems[0]
    (out / "manifest.json").unlink()
    check_message(inspect_folder(out).problems[0], "manifest.json", "missing")
    (run / "state" / "step_00000100" / "trainer.json").write_text("{ }")
    (run / "draft" / "model.safetensors").unlink()
    (run / "provenance.json").unlink()
    problems = "\n".join(inspect_folder(run).problems)
    for part in ("trainer.json: corrupt: 3 bytes", "provenance.json: missing", "no weights"):
        assert part in problems


# -- the lock ----------------------------------------------------------------------------------------------------------


def test_a_run_that_another_process_trains_is_refused(tmp_path, monkeypatch, caplog):
    """Until that process ends, also by SIGKILL."""
    monkeypatch.setattr(run_folder, "WAIT_S", 0)
    script = (
        f"from checkpoints.run_folder import *\nwith locked_run(Path({str(tmp_path / 'run')!r})): print(flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline()
    with refused(f"run.dir={tmp_path / 'run'}"), locked_run(tmp_path / "run"):
        raise AssertionError
    assert "waiting" in caplog.text and str(tmp_path / "run" / LOCK) in caplog.text and is_locked(tmp_path / "run")
    process.kill()
    process.communicate()
    assert not is_locked(tmp_path / "run") and not is_locked(tmp_path)
    for _ in range(2):
        with locked_run(tmp_path / "run"):
            assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]


@pytest.mark.parametrize("error", [NotImplementedError("no flock"), OSError(37, "No locks available")])
def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog, error):
    caplog.set_level("INFO", "checkpoints")

    def failing(self: Any, **_: Any) -> None:
        raise error

    monkeypatch.setattr(run_folder.FileLock, "acquire", failing)
    with locked_run(tmp_path / "run"):
        assert (tmp_path / "run").is_dir() and str(error) in caplog.text

"""`sage-export --inspect` on every kind of folder, intact and corrupt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.export_helpers import REDUCED, export_draft, save_run, save_target
from support.messages import check_message, refused

from checkpoints.export.importer import convert
from checkpoints.inspect import inspect_folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    save_run(folder / "run", save_target(folder / "target"), {100: 2.5, 200: 2.25}, vocabulary=REDUCED)
    export_draft(folder / "run", folder / "export")
    convert(folder / "export", str(folder / "target"), folder / "back")
    return folder


def test_run(home: Path) -> None:
    text = inspect_folder(home / "run").text()
    assert text.startswith(f"{home / 'run'}: run, intact")
    for line in (
        "steps trained 200",
        "data fingerprint f00d",
        f"target {home / 'target'}: qwen2_5_vl, 3 layers, hidden size 32, vocabulary 330",
        "drafts draft_best, draft",
        "draft sage_eagle3, 16,416 parameters",
        "validation tokens/pass accepted speedup identical",
        "sage 2.25 1.25 1.75 4/4",
    ):
        assert line in [" ".join(line.split()) for line in text.splitlines()]


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
    with refused("--inspect", "gone"):
        inspect_folder(tmp_path / "gone")
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

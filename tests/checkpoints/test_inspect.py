"""What `sage-export --inspect` says of every kind of folder, whole and damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.export_helpers import REDUCED, export_draft, save_draft, save_run, save_target

from checkpoints.export import convert
from checkpoints.inspect import describe


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    save_run(folder / "run", save_target(folder / "target"), {100: 2.5, 200: 2.25}, vocabulary=REDUCED)
    export_draft(folder / "run", folder / "export")
    convert(folder / "export", str(folder / "target"), folder / "back")
    return folder


def test_run(home: Path) -> None:
    text = describe(home / "run").text()
    assert text.startswith(f"{home / 'run'}: run, whole")
    for line in (
        "steps trained 200",
        "data fingerprint f00d",
        f"target {home / 'target'}: qwen2_5_vl, 3 layers, 32 wide, 330 tokens",
        "drafts draft_best, draft",
        "draft sage_eagle3, 16,416 parameters",
        "validation tokens/pass accepted speedup identical",
        "sage 2.25 1.25 1.75 4/4",
    ):
        assert line in [" ".join(told.split()) for told in text.splitlines()]


def test_draft(home: Path) -> None:
    found = describe(home / "run" / "draft_best")
    assert found.is_whole
    assert found.kind == "draft (ours, for sage.load_draft)"
    assert found.facts["steps trained"] == 100
    assert found.facts["draft vocabulary"] == "109"
    assert found.facts["feature levels"] == [0, 1, 2]
    assert found.table["sage"]["tokens_per_target_pass"] == 2.5


def test_export_and_what_was_imported_from_it(home: Path) -> None:
    for name, kind in (("export", "export"), ("back", "draft (ours, for sage.load_draft)")):
        found = describe(home / name)
        assert (found.kind, found.is_whole) == (kind, True)
        assert found.facts["steps trained"] == 100
        assert found.facts["data fingerprint"] == "f00d"
        assert found.facts["parameters"] == "16,416"
        assert found.table["sage"]["speedup"] == 1.75
    assert describe(home / "export").facts["format"] == "eagle3"
    assert describe(home / "back").facts["imported from"] == str(home / "export")
    json.dumps(describe(home / "export").to_dict())


def test_state_target_and_nothing(home: Path, tmp_path: Path) -> None:
    state = describe(home / "run" / "state" / "step_00000200")
    assert (state.kind, state.facts["steps trained"], state.is_whole) == ("saved state of a run", 200, True)
    assert describe(home / "target").kind.startswith("target")
    assert state.facts["target"].startswith(str(home / "target"))
    nothing = describe(tmp_path)
    assert (nothing.kind, nothing.is_whole) == ("unknown", False)
    assert nothing.text().splitlines()[0] == f"{tmp_path}: unknown"
    around = describe(home)
    assert (around.kind, around.facts["run"], around.facts["export"]) == ("unknown", "run", "export")
    with pytest.raises(ValueError, match="gone: no such folder"):
        describe(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"provenance\.json: a file; give its folder"):
        describe(home / "run" / "provenance.json")


def test_foreign_draft(home: Path, tmp_path: Path) -> None:
    out = export_draft(home / "run", tmp_path / "theirs").folder
    for name in ("manifest.json", "sage_export.json"):
        (out / name).unlink()
    found = describe(out)
    assert (found.kind, found.facts["format"], found.is_whole) == ("foreign draft", "eagle3", True)
    (out / "model.safetensors").write_bytes(b"")
    assert "damaged or not a safetensors file" in describe(out).problems[0]


def test_damage_is_told(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    run = save_run(tmp_path / "run", target, {100: 2.0})
    out = export_draft(run, tmp_path / "out").folder
    path = out / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    found = describe(out)
    assert "DAMAGED" in found.text()
    assert "model.safetensors: corrupt" in found.problems[0]
    (out / "manifest.json").unlink()
    assert "manifest.json: missing, nothing vouches for the files" in describe(out).problems[0]
    (run / "state" / "step_00000100" / "trainer.json").write_text("{ }")
    (run / "draft" / "model.safetensors").unlink()
    (run / "provenance.json").unlink()
    problems = "\n".join(describe(run).problems)
    for part in ("trainer.json: corrupt: 3 bytes", "provenance.json: missing", "no weights there"):
        assert part in problems


def test_damage_to_what_describes_a_run_is_told_too(tmp_path: Path) -> None:
    """Files without a manifest: not JSON, not YAML, not UTF-8; each is named, and nothing stops the looking."""
    run = save_run(tmp_path / "run", save_target(tmp_path / "target"), {100: 2.0})
    names = ("provenance.json", "config.yaml", "draft/config.json", "validation/step_00000100/report.json")
    for name in names:
        whole = (run / name).read_bytes()
        (run / name).write_bytes(b"{\xff")
        found = describe(run)
        assert found.kind == "run"
        assert any(name in problem for problem in found.problems), name
        (run / name).write_bytes(whole)
    assert describe(run).is_whole


def test_a_draft_without_a_run(tmp_path: Path) -> None:
    found = describe(save_draft(tmp_path / "lone", save_target(tmp_path / "target"), "eagle"))
    assert found.is_whole
    assert found.facts["architecture"] == "sage_eagle"
    assert "steps trained" not in found.facts
    assert "compressor" not in found.facts
    short = save_draft(tmp_path / "short", save_target(tmp_path / "target"), compressor={"kind": "pool", "ratio": 20})
    assert describe(short).facts["compressor"] == "pool ratio=20"

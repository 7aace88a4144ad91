"""The engines that can serve a draft, and the settings in the way: the line of a run, and the obstacles of an export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.export_helpers import make_draft, save_draft, save_target

import sage
from checkpoints.export.__main__ import main
from checkpoints.export.serving import serving_line

POOL = {"kind": "pool", "ratio": 4}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, sage.Target]:
    """Both tiny targets, saved."""
    return {name: save_target(tmp_path_factory.mktemp(name) / "target", name) for name in ("qwen2_5_vl", "llava_onevision")}


def line_of(target: sage.Target, kind: str = "eagle3", **options: Any) -> str:
    return serving_line(make_draft(target, kind, **options), target.model.config)


def test_an_eagle3_draft_is_served_by_both_engines(targets: dict[str, sage.Target]) -> None:
    line = line_of(targets["qwen2_5_vl"])
    served = line.split(", this decoder")[0]
    assert "vLLM (sage-export --format eagle3" in served and "SGLang (sage-export --format eagle3" in served
    assert "not by" not in line and "\n" not in line


@pytest.mark.parametrize(("inputs", "fed"), [("embed", "token"), ("token", "embed")])
def test_the_engine_with_other_image_inputs_is_named(targets: dict[str, sage.Target], inputs: str, fed: str) -> None:
    line = line_of(targets["qwen2_5_vl"], image_inputs=inputs)
    assert f"draft.image_inputs={fed}: lower acceptance" in line and f"draft.image_inputs={inputs}" not in line


@pytest.mark.parametrize(
    ("kind", "options", "settings"),
    [
        ("eagle", {"input_norm": True}, ["draft.input_norm=true", "draft.input_norm=false"]),
        ("eagle3", {"compressor": POOL}, ["draft.compressor=pool ratio=4", "draft/compressor=none"]),
        ("eagle3", {"feature_levels": [1]}, ["draft.feature_levels=[1]"]),
        ("eagle", {"input_norm": True, "compressor": POOL}, ["draft.input_norm=true", "draft.compressor=pool ratio=4"]),
    ],
)
def test_settings_in_the_way_are_named(
    targets: dict[str, sage.Target], kind: str, options: dict[str, Any], settings: list[str]
) -> None:
    line = line_of(targets["qwen2_5_vl"], kind, **options)
    assert line.startswith("can be served by this decoder only; not by vLLM and SGLang: ")
    for setting in settings:
        assert setting in line


def test_a_target_family_that_no_engine_serves(targets: dict[str, sage.Target]) -> None:
    assert "only; not by vLLM and SGLang: target=llava_onevision" in line_of(targets["llava_onevision"])


def test_a_smaller_model_has_no_export(targets: dict[str, sage.Target]) -> None:
    target = targets["qwen2_5_vl"]
    assert "draft=model" in serving_line(target.model, target.model.config)


def test_an_export_names_all_obstacles_at_once(
    targets: dict[str, sage.Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = save_draft(tmp_path / "draft", targets["llava_onevision"], "eagle", input_norm=True, compressor=POOL)
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["sage-export", str(draft), "--format", "eagle", "--out", str(out)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2 and not out.exists()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert [line.split(":")[1].strip() for line in lines] == ["--flavour", "target", "draft.input_norm", "draft.compressor"]

"""An export format is one class and one row of the registry: everything that handles formats asks the object."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.export_helpers import edit_json, make_draft, outputs, save_draft

import sage
from checkpoints.export.configs import EngineConfig
from checkpoints.export.format_checks import LAYER_CHECKS, check_tensors
from checkpoints.export.formats.base import CheckInput, Finding, Obstacle
from checkpoints.export.formats.eagle import Eagle3Format
from checkpoints.export.importer import check_folder
from checkpoints.export.registry import FORMATS, FormatRow
from checkpoints.export.target import TargetFacts
from sage.drafts.registry import KINDS
from train.serve_check.check import check_served


def block_size(given: CheckInput) -> Iterator[Finding]:
    if given.config.size("block_size") is None:
        yield Finding("block_size", "missing", "the engine drafts one token per round")


class BlockFormat(Eagle3Format):
    """EAGLE-3 drafts under names of their own, for an engine that needs a field of its own."""

    checks = (*LAYER_CHECKS, block_size, check_tensors)
    layer = "block."
    engine_class = "BlockDraftModel"
    method = "block"
    output = "block"
    vllm_options = {"method": method, "parallel_drafting": True}

    def config(self, draft: Any, facts: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
        return super().config(draft, facts, dtype) | {"block_size": 4}

    def obstacles(self, draft: Any, facts: TargetFacts) -> Iterator[Obstacle]:
        if draft.image_inputs != "token":
            yield Obstacle(key="draft.image_inputs", problem="blocks have no images", remedy="train with token")

    def recognizes(self, config: EngineConfig) -> bool:
        return self.engine_class in config.classes


ROW = FormatRow(name="block", home=f"{__name__}:BlockFormat", engines={None: ("vLLM",)}, imports="block")


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry with one more row, which a kind of draft names."""
    monkeypatch.setitem(FORMATS, ROW.name, ROW)
    kind = KINDS["eagle3"]
    monkeypatch.setitem(KINDS, "eagle3", replace(kind, export_formats=(*kind.export_formats, ROW.name)))


@pytest.mark.usefixtures("row")
def test_a_row_is_exported_checked_described_and_imported(target: sage.Target, tmp_path: Path, sage_export: Any) -> None:
    draft, out, back = save_draft(tmp_path / "draft", target, image_inputs="token"), tmp_path / "out", tmp_path / "back"
    code, text, _ = sage_export(draft, "--format", "block", "--out", out, "--dtype", "float32")
    assert code == 0 and "bit-identical" in text and "block.mlp.up_proj.weight" in load_file(out / "model.safetensors")
    card = (out / "README.md").read_text()
    for part in ("`block`", '"method": "block", "parallel_drafting": true', "of the blocks 100.0%", f"--import {out}"):
        assert part in card
    assert "SGLang" not in card
    assert sage_export("--check", out)[1].endswith(f"{out}: block; valid\n")
    assert "format" in sage_export("--inspect", out)[1] and "block" in sage_export("--inspect", out)[1]
    assert sage_export("--import", out, "--target", target.name, "--out", back)[0] == 0
    trained, imported = (sage.load_draft(folder, target) for folder in (draft, back))
    assert torch.equal(outputs(trained), outputs(imported))
    served = check_served(check_folder(out), TargetFacts.of_folder(target.name))
    assert served.vllm_options == {"method": "block", "parallel_drafting": True}

    (out / "manifest.json").unlink()
    edit_json(out / "config.json", lambda config: config.pop("block_size"))
    code, text, _ = sage_export("--check", out)
    assert code == 2 and "block_size: missing" in text


@pytest.mark.usefixtures("row")
def test_a_row_is_offered_and_its_obstacles_are_named(target: sage.Target, tmp_path: Path, sage_export: Any) -> None:
    code, text, _ = sage_export("--help")
    assert code == 0 and "or block (vLLM)" in " ".join(text.split())
    make_draft(target, image_inputs="embed").save_pretrained(tmp_path / "draft")
    code, _, error = sage_export(tmp_path / "draft", "--format", "onnx", "--out", tmp_path / "out")
    assert code == 2 and "choose one of eagle3, speculators, eagle, peagle, dflash, dspark, gguf, block" in error
    code, _, error = sage_export(tmp_path / "draft", "--format", "block", "--out", tmp_path / "out")
    assert code == 2 and error == "error: draft.image_inputs: blocks have no images; train with token\n"

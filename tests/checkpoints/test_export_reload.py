"""What an export computes: the reload check, and the round trip through an import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.export_helpers import EXPORTS, export_draft, make_draft, save_draft
from support.messages import refused

import sage
from checkpoints.export.exporter import check_reload, find_facts
from checkpoints.export.formats import find_format
from checkpoints.export.formats.eagle import Eagle3Format
from checkpoints.export.importer import InvalidExport, check_folder, convert
from sage.drafts.head import DraftHead


class TestReload:
    def test_invalid_export_is_discarded(self, target: sage.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The validator runs on the written files."""
        monkeypatch.setattr(Eagle3Format, "tensors", lambda self, state, dtype: {"fc.weight": state["fc.weight"]})
        draft = save_draft(tmp_path / "draft", target)
        with refused("lm_head.weight: missing", "acceptance 1.00", error=InvalidExport):
            export_draft(draft, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]

    def test_export_with_other_outputs_is_discarded(
        self, target: sage.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Names, shapes and value ranges are valid; only two tensors are swapped."""

        def swapped(tensors: dict[str, torch.Tensor], path: Path, metadata: Any) -> None:
            gate, up = "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"
            save_file({**tensors, gate: tensors[up], up: tensors[gate]}, path, metadata=metadata)

        monkeypatch.setattr("checkpoints.export.exporter.save_file", swapped)
        draft = save_draft(tmp_path / "draft", target)
        with refused(str(tmp_path / "out"), "outputs differ", error=InvalidExport):
            export_draft(draft, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]

    def test_rounding_is_measured(self, target: sage.Target, tmp_path: Path) -> None:
        draft = save_draft(tmp_path / "draft", target)
        exact = export_draft(draft, tmp_path / "exact", dtype=torch.float32).rounding
        rounded = export_draft(draft, tmp_path / "rounded").rounding
        assert exact.max_abs_difference == 0
        assert exact.agreement == 1
        assert 0 < rounded.max_abs_difference < 0.5  # bf16 keeps 8 bits: 1/256 of logits that are about ten here, and some sums

    def test_one_changed_weight_is_detected(self, target: sage.Target, tmp_path: Path) -> None:
        draft = make_draft(target)
        draft.save_pretrained(tmp_path / "draft")
        out = export_draft(tmp_path / "draft", tmp_path / "out", dtype=torch.float32).folder
        facts = find_facts(draft.config, None)
        check_reload(out, find_format("eagle3"), draft, facts)
        draft.midlayer.mlp.down_proj.weight.data[3, 5] += 0.01
        with refused("outputs differ", error=InvalidExport):
            check_reload(out, find_format("eagle3"), draft, facts)

    @pytest.mark.parametrize("name", ["speculators", "dspark", "peagle_two"])
    def test_the_outputs_depend_on_every_tensor(self, exports: Path, target: sage.Target, name: str) -> None:
        """A reload check that a tensor does not reach would not see that tensor."""
        format_, draft = find_format(EXPORTS[name][3]), sage.load_draft(exports / f"{name}-draft", target)
        assert isinstance(draft, DraftHead)
        before = format_.outputs(draft)
        for weight_name, weight in draft.named_parameters():
            kept = weight.detach().clone()
            with torch.no_grad():
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
                assert not torch.equal(format_.outputs(draft), before), weight_name
                weight.copy_(kept)


@pytest.mark.parametrize("name", ["plain", "reduced", "native", "dspark", "peagle", "peagle_two"])
def test_an_export_in_fp32_is_read_back_as_it_was(exports: Path, tmp_path: Path, target: sage.Target, name: str) -> None:
    trained = sage.load_draft(exports / f"{name}-draft", target)
    format_ = check_folder(exports / name).format
    assert format_ is not None
    for back in (
        sage.load_draft(exports / name, target),
        sage.load_draft(convert(exports / name, str(target.name), tmp_path / "back"), target),
    ):
        state, own = back.state_dict(), trained.state_dict()
        assert state.keys() == own.keys() and all(torch.equal(state[key], own[key]) for key in own)
        assert back.options() == trained.options() and back.levels == trained.levels
        assert torch.equal(back.mask_embedding, trained.mask_embedding)
        assert torch.equal(format_.outputs(back), format_.outputs(trained))


def test_an_export_of_an_import_is_bit_identical(exports: Path, target: sage.Target, tmp_path: Path) -> None:
    convert(exports / "eagle3", str(target.name), tmp_path / "back")
    export_draft(tmp_path / "back", tmp_path / "two")
    for name in ("model.safetensors", "config.json"):
        assert (exports / "eagle3" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()

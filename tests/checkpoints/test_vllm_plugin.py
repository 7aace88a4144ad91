"""The plugin for vLLM with a stand-in for vLLM: what it registers, releases it does not know, the correction of slots."""

import logging
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.messages import check_message
from torch import Tensor

from checkpoints import vllm_plugin
from checkpoints.vllm_plugin import correct_draft_slots
from sage.targets.families import FAMILIES

ROOT = Path(__file__).parents[2]


def test_the_entry_point_is_what_the_serve_check_looks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, place),) = project["entry-points"]["vllm.general_plugins"].items()
    module, _, function = place.partition(":")
    assert (name, getattr(import_module(module), function)) == (vllm_plugin.PLUGIN, vllm_plugin.register)
    assert project["optional-dependencies"]["vllm"] == [f"vllm=={release}.*" for release in vllm_plugin.RELEASES]


def test_targets_are_those_of_the_families_that_need_it() -> None:
    needing = {family.model_types[name] for name, family in FAMILIES.items() if family.needs_plugin}
    assert needing == set(vllm_plugin.TARGETS)


@pytest.mark.parametrize(("release", "is_known"), [("0.32.0", True), ("0.32.1.post2", True), ("0.33.0", False), ("", False)])
def test_a_release_that_is_not_known_is_not_changed(release, is_known, monkeypatch, caplog):
    registered: dict[str, str] = {}
    vllm: Any = ModuleType("vllm")
    vllm.ModelRegistry = SimpleNamespace(register_model=registered.__setitem__)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    corrected: list[bool] = []
    monkeypatch.setattr(vllm_plugin, "correct_draft_slots", lambda: corrected.append(True))
    monkeypatch.setattr(vllm_plugin, "vllm_version", lambda: release)
    with caplog.at_level(logging.INFO, logger="vllm"):
        vllm_plugin.register()
    if is_known:
        names = (*vllm_plugin.TARGETS, vllm_plugin.EAGLE_WITH_NORM)
        assert registered == {name: f"checkpoints.vllm_plugin.models:{name}" for name in names}
        assert corrected == [True]
        assert not caplog.records  # its lines appear where it acts
    else:
        (line,) = [record.getMessage() for record in caplog.records]
        assert not registered and not corrected
        check_message(line, "sage-draft", f"vLLM {release} is unknown", "changes nothing", "0.32")


def test_drafted_tokens_are_stored_at_their_index_not_at_their_rope_position(monkeypatch, caplog):
    def update(*, positions_1d: Tensor, seq_lens: Tensor, out_clamped_positions: Tensor, out_slots: Tensor) -> None:
        out_slots.copy_(positions_1d + 1)
        out_clamped_positions.copy_(positions_1d + 1)
        seq_lens += 1

    spec_decode: Any = ModuleType("vllm.v1.spec_decode")
    spec_decode.llm_base_proposer = SimpleNamespace(eagle_step_update_slot_mapping_and_metadata=update)
    for name, module in (("vllm", ModuleType("vllm")), ("vllm.v1", ModuleType("vllm.v1")), (spec_decode.__name__, spec_decode)):
        monkeypatch.setitem(sys.modules, name, module)
    correct_draft_slots()
    correct_draft_slots()  # vLLM may load a plugin twice
    positions, lengths, slots = torch.tensor([26]), torch.tensor([39], dtype=torch.int32), torch.tensor([0])
    corrected = spec_decode.llm_base_proposer.eagle_step_update_slot_mapping_and_metadata
    caplog.set_level(logging.INFO, logger="vllm")
    for step in (1, 2):  # the positions are updated in place, as in vLLM's buffer
        corrected(positions_1d=positions, seq_lens=lengths, out_clamped_positions=positions, out_slots=slots)
        assert (positions.item(), lengths.item(), slots.item()) == (26 + step, 39 + step, 38 + step)
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == ["54498)"]

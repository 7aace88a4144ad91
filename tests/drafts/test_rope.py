"""Rope of draft heads against the rotary embedding of the target, unscaled and scaled."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.export_helpers import export_draft, make_draft
from support.messages import refused
from support.models import in_float64, make_inputs, make_llava, make_qwen, random_draft

import sage
from checkpoints.export.importer import read_draft
from checkpoints.export.target import TargetFacts
from sage.drafts.eagle import EagleConfig
from sage.drafts.layer import Rope

SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
}
REFUSED: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 4.0},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 128},
}


def scaled_target(make: Any, rope_type: str, parameters: dict[str, Any]) -> sage.Target:
    """A tiny target whose text model has a scaled rope."""
    plain = make()
    config = plain.model.config
    config.text_config.rope_parameters = {**config.text_config.rope_parameters, "rope_type": rope_type, **parameters}
    torch.manual_seed(0)
    return sage.Target(type(plain.model)(config).eval())


def test_three_axes_without_sections_are_refused() -> None:
    with refused("mrope_section"):
        Rope(EagleConfig(head_dim=8, rope_theta=1e4))(torch.zeros(3, 1, 2, dtype=torch.long), torch.float32)


@pytest.mark.parametrize("rope_type", ["default", *SCALED])
@pytest.mark.parametrize("make", [make_qwen, make_llava])
def test_rope_is_the_targets(make: Any, rope_type: str) -> None:
    """Both compute angles in float32. Unscaled frequencies differ in their last place, which position 500 multiplies."""
    target = make() if rope_type == "default" else scaled_target(make, rope_type, SCALED[rope_type])
    in_float64(target, {})
    shape = (3, 2, 7) if target.family.model_type == "qwen2_5_vl" else (2, 7)
    positions = torch.randint(0, 500, shape, generator=torch.Generator().manual_seed(0))
    cos, sin = target.text_model.rotary_emb(torch.zeros(1, dtype=torch.float64), positions)
    draft = sage.new_draft(target, seed=0)
    assert (draft.config.scaled_rope is None) == (rope_type == "default")
    ours = draft.rope(positions, torch.float64)
    tolerance = 1e-4 if rope_type == "default" else 1e-6
    torch.testing.assert_close(ours[0][:, 0], cos, atol=tolerance, rtol=0)
    torch.testing.assert_close(ours[1][:, 0], sin, atol=tolerance, rtol=0)


@pytest.mark.parametrize("rope_type", SCALED)
def test_scaling_changes_the_draft(rope_type: str) -> None:
    """Negative control: without the stored parameters the angles are others."""
    draft = sage.new_draft(scaled_target(make_llava, rope_type, SCALED[rope_type]), seed=0)
    plain = Rope(EagleConfig(head_dim=8, rope_theta=draft.config.rope_theta))
    positions = torch.arange(100)[None]
    assert (draft.rope(positions, torch.float64)[0] - plain(positions, torch.float64)[0]).abs().max() > 0.1


@pytest.mark.parametrize("make", [make_qwen, make_llava])
def test_a_draft_of_a_scaled_target_reloads_and_decodes(make: Any, tmp_path: Path) -> None:
    target = scaled_target(make, "yarn", SCALED["yarn"])
    draft = random_draft(target, seed=0)
    draft.save_pretrained(tmp_path)
    loaded: Any = sage.load_draft(tmp_path, target)
    assert loaded.config.scaled_rope == draft.config.scaled_rope
    positions = torch.arange(9)[None]
    assert torch.equal(loaded.rope(positions, torch.float64)[0], draft.rope(positions, torch.float64)[0])
    inputs = in_float64(target, make_inputs(target))
    plain = sage.generate(target, None, inputs, policy="autoregressive", max_new_tokens=8)
    assert torch.equal(sage.generate(target, loaded.double(), inputs, "static", max_new_tokens=8).tokens, plain.tokens)


@pytest.mark.parametrize("rope_type", REFUSED)
def test_frequencies_that_depend_on_the_length_are_refused(rope_type: str) -> None:
    target = scaled_target(make_llava, rope_type, REFUSED[rope_type])
    with refused("rope_type", rope_type, "linear, llama3, yarn"):
        sage.new_draft(target)


def test_partial_and_several_ropes_are_refused(tiny_llava: sage.Target) -> None:
    parameters = tiny_llava.text_config.rope_parameters
    tiny_llava.text_config.rope_parameters = parameters | {"partial_rotary_factor": 0.4}
    with refused("partial_rotary_factor", "0.4"):
        sage.new_draft(tiny_llava)
    tiny_llava.text_config.rope_parameters = {"full_attention": parameters, "sliding_attention": parameters}
    with refused("rope_theta"):
        sage.new_draft(tiny_llava)


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_an_export_carries_the_scaled_rope(kind: str, tmp_path: Path) -> None:
    """The export proves itself by reloading, so that the written parameters are those that the draft computes with."""
    target = scaled_target(make_llava, "yarn", SCALED["yarn"])
    make_draft(target, kind).save_pretrained(tmp_path / "draft")
    export_draft(tmp_path / "draft", tmp_path / "out", kind, overwrite=True)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    facts = TargetFacts.of_config(target.model.config, None)
    assert written["rope_scaling"] == facts.scaled_rope == {"rope_type": "yarn", **SCALED["yarn"]}
    if kind == "eagle3":
        assert read_draft(tmp_path / "out", facts).config.scaled_rope == facts.scaled_rope
        plain = TargetFacts.of_config(make_llava().model.config, None)
        with refused("rope_scaling", "yarn"):
            read_draft(tmp_path / "out", plain)


def test_an_export_refuses_a_scaled_rope_with_three_axes(tmp_path: Path) -> None:
    make_draft(scaled_target(make_qwen, "yarn", SCALED["yarn"])).save_pretrained(tmp_path / "draft")
    with refused("draft.scaled_rope", "yarn", "mrope_section"):
        export_draft(tmp_path / "draft", tmp_path / "out")

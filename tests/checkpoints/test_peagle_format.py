"""Exports of P-EAGLE drafts: what is written, every known trap, and the way back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.export_helpers import (
    LEVELS,
    REDUCED,
    Damage,
    assert_outputs_depend_on_every_tensor,
    change_config,
    change_tensors,
    copy_export,
    export_draft,
    make_draft,
    save_target,
)
from support.messages import check_message, refused

import sage
from checkpoints.export.checks import check_folder
from checkpoints.export.configs import TargetFacts
from checkpoints.export.formats.registry import find_format
from checkpoints.export.importer import convert, read_draft

MASK = 7
PEAGLE: dict[str, Any] = {"block_size": 4, "num_layers": 2, "mask_token": MASK, "image_inputs": "token"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> sage.Target:
    return save_target(tmp_path_factory.mktemp("exports") / "target")


@pytest.fixture(scope="module")
def home(target: sage.Target) -> Path:
    """A folder with a target, a draft, its export, and the export of one with two feature levels and a reduced vocabulary."""
    home = Path(str(target.name)).parent
    for name, levels, vocabulary in (("three", LEVELS, None), ("two", [0, 2], REDUCED)):
        make_draft(target, "peagle", vocabulary=vocabulary, feature_levels=levels, **PEAGLE).save_pretrained(
            home / f"{name}-draft"
        )
        export_draft(home / f"{name}-draft", home / name, "peagle", dtype=torch.float32)
    return home


def test_the_layout(home: Path, target: sage.Target) -> None:
    config, tensors = json.loads((home / "two" / "config.json").read_text()), load_file(home / "two" / "model.safetensors")
    draft = sage.load_draft(home / "two-draft", target)
    assert (config["speculators_model_type"], config["mask_token_id"]) == ("peagle", MASK)
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 2]
    assert config["norm_before_residual"] is False and config["embed_requires_grad"] is True
    layer = config["transformer_layer_config"]
    assert (layer["num_aux_hidden_states"], layer["num_hidden_layers"], layer["model_type"]) == (2, 2, "llama")
    assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0} and "rope_scaling" not in layer
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert tensors["mask_hidden"].shape == (1, 1, 64) and "mask_embedding" not in tensors
    assert torch.equal(tensors["layers.1.mlp.up_proj.weight"], draft.layers[0].mlp.up_proj.weight)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape[1] == 2 * tensors["layers.1.self_attn.q_proj.weight"].shape[1]
    table, expected = tensors["embed_tokens.weight"], target.embed_tokens.weight.detach().clone()
    expected[MASK] = draft.mask_embedding[0, 0]
    assert torch.equal(table, expected)


@pytest.mark.parametrize("name", ["three", "two"])
def test_intact_exports_are_valid_and_read_back(home: Path, tmp_path: Path, target: sage.Target, name: str) -> None:
    check = check_folder(home / name)
    assert not check.findings and check.format is not None and check.format.name == "peagle"
    trained = sage.load_draft(home / f"{name}-draft", target)
    for back in (
        sage.load_draft(home / name, target),
        sage.load_draft(convert(home / name, str(target.name), tmp_path / "back"), target),
    ):
        state, own = back.state_dict(), trained.state_dict()
        assert state.keys() == own.keys() and all(torch.equal(state[key], own[key]) for key in own)
        assert back.options() == trained.options() and back.levels == trained.levels
        assert torch.equal(check.format.outputs(back), check.format.outputs(trained))


def test_serving(home: Path, target: sage.Target) -> None:
    format_ = find_format("peagle")
    assert format_.vllm_options == {"method": "eagle3", "parallel_drafting": True}
    card = (home / "three" / "README.md").read_text()
    assert f"vllm serve {home / 'three'}" in card and "text prompts as trained" in card
    with refused("--no-embedding", "mask token"):
        export_draft(home / "three-draft", home / "out", "peagle", embedding=False)


def test_the_outputs_depend_on_every_tensor(home: Path, target: sage.Target) -> None:
    assert_outputs_depend_on_every_tensor(find_format("peagle"), sage.load_draft(home / "two-draft", target))


LAYER = "transformer_layer_config"
AXES = {"rope_theta": 1e4, "mrope_section": [2, 1, 1]}
DAMAGES: dict[str, tuple[str, Damage, str, tuple[str, ...]]] = {
    "no mask_hidden": (
        "three",
        change_tensors(lambda t: t.pop("mask_hidden")),
        "mask_hidden",
        ("missing", "parallel drafting"),
    ),
    "no mask token": ("three", change_config(mask_token_id=...), "mask_token_id", ("None", "0 to 329")),
    "levels that fc is not built for": (
        "two",
        change_config(LAYER, num_aux_hidden_states=...),
        "num_aux_hidden_states",
        ("3", "2"),
    ),
    "axes of M-RoPE": ("three", change_config(LAYER, rope_parameters=AXES), "rope_parameters", ("does not support M-RoPE",)),
    "fc_norm": ("three", change_config(fc_norm=True), "fc_norm", ("does not read it for P-EAGLE",)),
    "a short context": ("three", change_config(LAYER, max_position_embeddings=8), "max_position_embeddings", ("8", "512")),
    "one layer": ("three", change_config(LAYER, num_hidden_layers=1), "layers.1.mlp.up_proj.weight", ("unexpected",)),
    "no lm_head": ("two", change_tensors(lambda t: t.pop("lm_head.weight")), "lm_head.weight", ("missing",)),
    "levels beyond the target": ("three", change_config(eagle_aux_hidden_state_layer_ids=[0, 1, 3]), "layer_ids", ("0 to 2",)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_every_trap_is_found_and_named(home: Path, tmp_path: Path, name: str) -> None:
    kind, damage, where, parts = DAMAGES[name]
    folder = copy_export(home / kind, tmp_path / "broken")
    damage(folder)
    found = [str(finding) for finding in check_folder(folder).errors if finding.where.endswith(where)]
    assert found
    check_message(" | ".join(found), where, *parts)


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (change_config(norm_before_fc=True), ("norm_before_fc", "P-EAGLE")),
        (change_config(mask_token_id=330), ("mask_token_id", "330")),
        (change_config(speculators_config={}), ("speculative_tokens", "None")),
        (
            change_config(LAYER, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
            ("'linear'", "unscaled"),
        ),
        (
            change_tensors(lambda t: t["embed_tokens.weight"][8].add_(1)),
            ("embed_tokens.weight differs", "the target's embedding"),
        ),
    ],
)
def test_what_our_head_does_not_have_is_not_imported(
    home: Path, tmp_path: Path, target: sage.Target, damage: Damage, parts: tuple[str, ...]
) -> None:
    folder = copy_export(home / "three", tmp_path / "theirs")
    damage(folder)
    with refused(*parts):
        convert(folder, str(target.name), tmp_path / "out")


def test_without_an_embedding_the_mask_is_the_targets_row(home: Path, tmp_path: Path, target: sage.Target) -> None:
    folder = copy_export(home / "three", tmp_path / "theirs")
    change_tensors(lambda t: t.pop("embed_tokens.weight"))(folder)
    assert not check_folder(folder).errors
    draft = read_draft(folder, TargetFacts.of_folder(str(target.name)))
    assert torch.equal(draft.mask_embedding[0, 0], target.embed_tokens.weight[MASK])
    assert not find_format("peagle").warnings(draft.config, replace(TargetFacts.of_draft(draft.config), mrope_section=None))

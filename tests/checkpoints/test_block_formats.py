"""Exports of drafts that predict a block in one pass: what is written, what is refused, every known trap, and the way back."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.export_helpers import (
    BLOCK,
    BLOCK_KINDS,
    MASK,
    REDUCED,
    Damage,
    assert_outputs_depend_on_every_tensor,
    both,
    change_config,
    change_tensors,
    copy_export,
    export_draft,
    make_draft,
    mask_file,
    save_target,
)
from support.messages import check_message, refused
from transformers import Qwen3Config

import sage
from checkpoints.export.checks import CheckResult, check_folder
from checkpoints.export.configs import TargetFacts
from checkpoints.export.exporter import export
from checkpoints.export.formats.findings import ImportOptions
from checkpoints.export.formats.registry import find_format, variants
from checkpoints.export.importer import convert, read_draft
from checkpoints.export.result import ExportOptions
from checkpoints.export.serving import serving_line

AUX, TARGET_IDS = "aux_hidden_state_layer_ids", "dflash_config.target_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> sage.Target:
    return save_target(tmp_path_factory.mktemp("exports") / "target")


@pytest.fixture(scope="module")
def exports(target: sage.Target) -> Path:
    """A folder with a target, and a draft and its export of every kind."""
    home = Path(str(target.name)).parent
    for name, (format_, flavour, options, vocabulary) in BLOCK_KINDS.items():
        make_draft(target, "block", vocabulary=vocabulary, **options).save_pretrained(home / f"{name}-draft")
        export_draft(home / f"{name}-draft", home / name, format_, flavour=flavour, dtype=torch.float32)
    return home


def written(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


class TestExports:
    def test_every_key_is_written(self, exports: Path) -> None:
        config, tensors = written(exports / "reduced")
        assert (config["speculators_model_type"], config["architectures"]) == ("dflash", ["DFlashSpeculator"])
        assert "model_type" not in config
        assert (config[AUX], config["mask_token_id"], config["block_size"]) == ([1, 2], MASK, 4)
        assert config["sample_from_anchor"] is False
        assert config["sliding_window_non_causal"] is False and config["transformer_layer_config"]["is_causal"] is True
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
        layer = config["transformer_layer_config"]
        used = ("hidden_act", "rms_norm_eps", "head_dim", "num_key_value_heads", "rope_parameters", "max_position_embeddings")
        assert {*used} <= layer.keys()
        assert layer["max_position_embeddings"] == 512 and layer["layer_types"] == ["full_attention"] * 2
        assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}  # no axes of M-RoPE
        assert Qwen3Config(**layer).rope_parameters["rope_theta"] == 10000.0
        assert not {"embed_tokens.weight", "mask_hidden"} & tensors.keys()

    def test_a_reduced_vocabulary_has_the_targets_rows(self, exports: Path, target: sage.Target) -> None:
        _, tensors = written(exports / "reduced")
        assert torch.equal(tensors["lm_head.weight"], target.lm_head.weight[REDUCED])
        assert torch.equal(tensors["d2t"], REDUCED - torch.arange(len(REDUCED)))
        assert not {"lm_head.weight", "d2t", "t2d"} & written(exports / "plain")[1].keys()

    def test_the_native_layout_counts_layers(self, exports: Path) -> None:
        config, tensors = written(exports / "native")
        assert (config["architectures"], config["model_type"]) == (["DFlashDraftModel"], "qwen3")
        assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [0, 1], "causal": False}
        assert (config["is_causal"], config["block_size"], config["num_target_layers"]) == (False, 4, 3)
        assert tensors.keys() == written(exports / "plain")[1].keys()

    def test_dspark(self, exports: Path) -> None:
        config, tensors = written(exports / "dspark")
        assert config["sample_from_anchor"] is True
        assert (config["markov_rank"], config["markov_head_type"]) == (6, "vanilla")
        assert config["enable_confidence_head"] is config["confidence_head_with_markov"] is True
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
        assert tensors["markov_head.markov_w1.weight"].shape == (330, 6)
        assert tensors["markov_head.markov_w2.weight"].shape == (len(REDUCED), 6)
        assert tensors["confidence_head.proj.weight"].shape == (1, 32 + 6)

    @pytest.mark.parametrize("kind", BLOCK_KINDS)
    def test_intact_exports_are_valid_and_read_back(
        self, exports: Path, tmp_path: Path, target: sage.Target, kind: str
    ) -> None:
        check = check_folder(exports / kind)
        assert not check.errors and check.format is not None
        assert [finding.where for finding in check.warnings] == (["k_norm"] if kind == "reduced" else [])
        assert (check.format.name, check.format.flavour) == BLOCK_KINDS[kind][:2]
        trained = sage.load_draft(exports / f"{kind}-draft", target)
        for back in (
            sage.load_draft(exports / kind, target),
            sage.load_draft(convert(exports / kind, str(exports / "target"), tmp_path / "back"), target),
        ):
            state, own = back.state_dict(), trained.state_dict()
            assert state.keys() == own.keys() and all(torch.equal(state[name], own[name]) for name in own)
            assert back.options() == trained.options() and back.levels == trained.levels
            assert torch.equal(back.mask_embedding, target.embed_tokens.weight[MASK])
            assert torch.equal(check.format.outputs(back), check.format.outputs(trained))

    def test_the_card_names_commands_and_limits(self, exports: Path) -> None:
        cards = {kind: (exports / kind / "README.md").read_text() for kind in BLOCK_KINDS}
        assert f"\nvllm serve {exports / 'plain'}\n" in cards["plain"]
        assert '{"method": "dflash", "model": ' in cards["native"] and '"num_speculative_tokens": 3}' in cards["native"]
        assert "VLLM_USE_V2_MODEL_RUNNER=1 vllm serve" in cards["dspark"] and "does not run on a CPU" in cards["dspark"]
        assert "first layer" in cards["reduced"] and "first layer" not in cards["plain"]
        assert all("M-RoPE" in card for card in cards.values())


class TestObstacles:
    @pytest.mark.parametrize(
        ("format_", "flavour", "options", "parts"),
        [
            ("dflash", None, {"feed": True}, ("draft.feed: true", "draft.feed=false")),
            ("dflash", None, {"conditional": "mlp"}, ("draft.conditional: mlp", "conditional=none or markov")),
            ("dflash", None, {"conditional": "markov"}, ("draft.conditional: markov", "--format dspark")),
            ("dspark", None, {}, ("draft.conditional: none", "--format dflash")),
            ("dflash", None, {"feature_levels": [1, 3]}, ("draft.feature_levels: [1, 3]", "final norm", "0..2")),
            ("dflash", None, {"feature_levels": [2, 1]}, ("draft.feature_levels: [2, 1]", "increasing")),
            ("dflash", None, {"confidence": True}, ("draft.confidence", "draft.confidence=false")),
            ("dflash", "native", {"feature_levels": [0, 2]}, ("draft.feature_levels", "embeddings", "--flavour")),
            ("dflash", "native", {"vocabulary": REDUCED}, ("draft.draft_vocab_size: 109", "without --flavour")),
            ("dflash", "vllm", {}, ("--flavour vllm", "unknown", "native")),
            ("eagle3", None, {}, ("--format eagle3", "draft=block; its formats: dflash, dspark")),
        ],
    )
    def test_what_engines_cannot_compute_is_refused_by_name(
        self, target: sage.Target, tmp_path: Path, format_: str, flavour: str | None, options: dict[str, Any], parts: Any
    ) -> None:
        make_draft(target, "block", **(BLOCK | options)).save_pretrained(tmp_path / "draft")
        with refused(*parts):
            export(tmp_path / "draft", tmp_path / "out", format_, ExportOptions(flavour=flavour))
        assert not (tmp_path / "out").exists()

    def test_the_line_of_a_run_names_format_or_remedy(self, target: sage.Target) -> None:
        def line_of(**options: Any) -> str:
            return serving_line(make_draft(target, "block", **(BLOCK | options)), target.model.config)

        assert line_of().startswith("can be served by vLLM (sage-export --format dflash)")
        assert "vLLM (sage-export --format dspark)" in line_of(conditional="markov")
        assert "not by vLLM" in line_of(feed=True) and "draft.feed=false" in line_of(feed=True)

    def test_sglang_serves_the_native_layout_where_it_captures_levels(self, exports: Path) -> None:
        facts = TargetFacts.of_folder(exports / "target")
        plain, native = variants(["dflash"])
        assert plain.served_by(facts) == native.served_by(facts) == ("vLLM",)
        text = replace(facts, model_type="qwen3", mrope_section=None)
        assert plain.served_by(text) == ("vLLM",) and native.served_by(text) == ("vLLM", "SGLang")
        assert "--speculative-algorithm DFLASH" in native.serve_command("SGLang", "T", "D", 3)


# -- damaged and third-party folders --------------------------------------------------------------------------------------


def layer(**changes: Any) -> Damage:
    return change_config("transformer_layer_config", **changes)


def native(**changes: Any) -> Damage:
    return change_config("dflash_config", **changes)


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
UNSAID = layer(is_causal=...)
DAMAGES: dict[str, tuple[str, Damage, str, tuple[str, ...]]] = {  # export, damage, where the finding must be, its values
    "levels of the native layout": (
        "plain",
        change_config(**{AUX: [0, 1]}),
        AUX,
        ("[0, 1]", "one too low", "output of layer k - 1"),
    ),
    "levels one too high": ("native", native(target_layer_ids=[1, 2]), TARGET_IDS, ("one too high", "[1, 2]", "[2, 3]")),
    "levels twice": (
        "plain",
        change_config(dflash_config={"target_layer_ids": [1, 2]}),
        AUX,
        ("[1, 2]", "[2, 3]", "convention"),
    ),
    "levels of EAGLE": ("native", change_config(eagle_aux_hidden_state_layer_ids=[0, 1]), TARGET_IDS, ("[1, 2]", "[0, 1]")),
    "no levels": ("plain", change_config(**{AUX: ...}), AUX, ("missing", "fc")),
    "decreasing levels": ("plain", change_config(**{AUX: [2, 1]}), AUX, ("increasing",)),
    "a level beyond the target": (
        "native",
        native(target_layer_ids=[1, 3]),
        TARGET_IDS,
        ("[2, 4]", "3 layers", "one too high"),
    ),
    "a causal window flag": (
        "plain",
        both(UNSAID, change_config(sliding_window_non_causal=False)),
        "is_causal",
        ("missing", "trains"),
    ),
    "causalities differ": ("plain", layer(is_causal=True), "transformer_layer_config.is_causal", ("true", "says false")),
    "native causalities differ": ("native", change_config(is_causal=True), "is_causal", ("dflash_config.causal says false",)),
    "causality as text": ("plain", layer(is_causal="no"), "transformer_layer_config.is_causal", ("'no'",)),
    "mixed attention of other length": ("plain", layer(layer_types=["full_attention"] * 2), "layer_types", ("expected 1",)),
    "a window without size": ("plain", layer(layer_types=["sliding_attention"]), "sliding_window", ("None",)),
    "no block size": ("plain", change_config(block_size=...), "block_size", ("None", "block of 8")),
    "more tokens than slots": (
        "plain",
        change_config("speculators_config", proposal_methods=[{"proposal_type": "greedy", "speculative_tokens": 4}]),
        "speculative_tokens",
        ("4", "block of 4 drafts 3"),
    ),
    "a mask token outside": ("plain", change_config(mask_token_id=330), "mask_token_id", ("330", "0 to 329")),
    "no native mask token": ("native", native(mask_token_id=...), "dflash_config.mask_token_id", ("None",)),
    "a mask embedding of another size": ("plain", mask_file(8), "mask_embedding.pt", ("[8]",)),
    "a mask embedding of another token": ("plain", mask_file(32, 5), "mask_embedding.pt", ("token 5", "is 7")),
    "a mask embedding for DSpark": ("dspark", mask_file(32), "mask_embedding.pt", ("ignores",)),
    "no pickle of tensors": ("plain", lambda f: (f / "mask_embedding.pt").write_bytes(b"x") and None, "mask_embedding.pt", ()),
    "DFlash from the anchor": ("plain", change_config(sample_from_anchor=True), "sample_from_anchor", ("V2", "DSpark")),
    "DSpark without the flag": ("dspark", change_config(sample_from_anchor=...), "sample_from_anchor", ("None", "shift")),
    "no markov rank": ("dspark", change_config(markov_rank=0), "markov_rank", ("0", "DFlash")),
    "a gated head": ("dspark", change_config(markov_head_type="gated"), "markov_head_type", ("'gated'", "vanilla")),
    "axes of M-RoPE": (
        "plain",
        layer(rope_parameters={"rope_theta": 1e4, "mrope_section": [2, 1, 1]}),
        "rope_parameters",
        ("[2, 1, 1]", "does not support M-RoPE"),
    ),
    "another theta": ("plain", layer(rope_parameters={"rope_theta": 1e6}), "rope_theta", ("1e+06", "10000")),
    "no rope": ("plain", layer(rope_parameters=...), "rope_parameters", ("missing", "1e6")),
    "no head_dim": ("plain", layer(head_dim=...), "head_dim", ("None", "128")),
    "a short context": ("plain", layer(max_position_embeddings=256), "max_position_embeddings", ("256", "512")),
    "no context": ("plain", layer(max_position_embeddings=...), "max_position_embeddings", ("None",)),
    "no lm_head": (
        "reduced",
        change_tensors(lambda t: t.pop("lm_head.weight")),
        "lm_head.weight",
        ("missing", "acceptance 1.00"),
    ),
    "no d2t": ("reduced", change_tensors(lambda t: t.pop("d2t")), "d2t", ("missing",)),
    "absolute d2t": ("reduced", change_tensors(lambda t: t.update(d2t=REDUCED.clone())), "d2t", ("absolute", "offsets")),
    "a mask_hidden": (
        "plain",
        change_tensors(lambda t: t.update(mask_hidden=torch.ones(1, 1, 64))),
        "mask_hidden",
        ("unexpected",),
    ),
    "no k_norm": (
        "plain",
        change_tensors(lambda t: t.pop("layers.0.self_attn.k_norm.weight")),
        "layers.0.self_attn.k_norm.weight",
        ("missing",),
    ),
    "fc of other levels": ("plain", change_config(**{AUX: [0, 1, 2]}), "fc.weight", ("[32, 64]", "[32, 96]")),
    "an unknown class": ("plain", change_config(architectures=["X"]), "architectures", ("['X']", "DFlashSpeculator")),
    "a model_type on top": ("plain", change_config(model_type="qwen3"), "model_type", ("'qwen3'", "speculator")),
    "a Llama layer": ("plain", layer(model_type="llama"), "model_type", ("'llama'", "qwen3")),
    "no native part": ("native", change_config(dflash_config=None), "dflash_config", ("missing",)),
    "another target size": ("plain", change_config(target_hidden_size=64), "target_hidden_size", ("64", "32")),
}


def messages(check: CheckResult, where: str) -> list[str]:
    return [str(finding) for finding in check.findings if finding.where.endswith(where)]


@pytest.mark.parametrize("name", DAMAGES)
def test_every_trap_is_found_and_named(exports: Path, tmp_path: Path, name: str) -> None:
    kind, damage, where, parts = DAMAGES[name]
    folder = copy_export(exports / kind, tmp_path / "broken")
    damage(folder)
    check = check_folder(folder)
    assert check.errors and messages(check, where), [str(finding) for finding in check.findings]
    check_message(" | ".join(messages(check, where)), where, *parts)


@pytest.mark.parametrize(
    ("kind", "damage", "num_layers", "source"),
    [
        (
            "plain",
            change_config(**{AUX: [1, 9]}),
            12,
            "DFlash's own layout",
        ),  # outputs of layers 1 and 9, z-lab's default of two
        ("native", native(target_layer_ids=[2, 10]), 12, "speculators"),
        ("native", native(target_layer_ids=[2, 6, 9]), 12, "speculators"),
    ],
)
def test_defaults_of_the_other_convention_are_a_warning(
    exports: Path, tmp_path: Path, kind: str, damage: Damage, num_layers: int, source: str
) -> None:
    """A third-party folder does not say what it was trained with; its levels may be those of the other convention."""
    folder = copy_export(exports / kind, tmp_path / "theirs")
    (folder / "sage_export.json").unlink()
    damage(folder)
    facts = replace(TargetFacts.of_folder(exports / "target"), num_layers=num_layers)
    where = AUX if kind == "plain" else TARGET_IDS
    (found,) = messages(check_folder(folder, facts), where)
    check_message(found, source, "the other layout's convention")
    assert not messages(check_folder(folder), where)


def test_layouts_of_others_are_recognized(exports: Path, tmp_path: Path, target: sage.Target) -> None:
    """z-lab's: code to run, rope_theta at the top; speculators up to 0.7: the target's embedding and lm_head in the folder."""
    theirs = copy_export(exports / "native", tmp_path / "zlab")
    change_config(auto_map={"AutoModel": "dflash.X"}, rope_parameters=..., rope_theta=1e4, is_causal=..., layer_types=...)(
        theirs
    )
    native(causal=...)(theirs)
    check = check_folder(theirs)
    assert not check.errors and [finding.where for finding in check.warnings] == ["auto_map"]
    assert sage.load_draft(theirs, target).config.causal is False
    old = copy_export(exports / "plain", tmp_path / "old")
    table, rows = target.embed_tokens.weight.detach(), target.lm_head.weight.detach()
    change_tensors(lambda t: t.update({"embed_tokens.weight": table, "lm_head.weight": rows}))(old)
    assert not check_folder(old).errors
    sage.load_draft(old, target)
    change_tensors(lambda t: t.update({"lm_head.weight": rows.roll(1, 0)}))(old)
    with refused("lm_head.weight differs", "the target's lm_head"):
        sage.load_draft(old, target)
    moved = copy_export(exports / "reduced", tmp_path / "moved")
    change_tensors(lambda t: t.update({"lm_head.weight": t["lm_head.weight"].roll(1, 0)}))(moved)
    with refused("lm_head.weight differs"):
        convert(moved, str(exports / "target"), tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "damage", "parts"),
    [
        ("plain", mask_file(32), ("mask_embedding.pt",)),
        ("plain", change_config(block_size=...), ("block_size",)),
        ("plain", change_config(sample_from_anchor=True), ("sample_from_anchor", "not false")),
        ("plain", layer(layer_types=["sliding_attention"], sliding_window=64), ("layer_types", "sliding")),
        ("plain", layer(attention_bias=True), ("attention_bias",)),
        ("plain", layer(rope_parameters=LINEAR), ("'linear'", "--use-target-rope")),
        ("plain", layer(hidden_size=64), ("hidden_size", "64", "32")),
        ("plain", change_config(**{AUX: [1, 3]}), (AUX, "final norm", "--levels")),
        ("plain", change_config(mask_token_id=None), ("mask_token_id",)),
        ("plain", change_tensors(lambda t: t.pop("fc.weight")), ("fc.weight: missing",)),
        ("dspark", change_config(markov_head_type="rnn"), ("markov_head_type", "'rnn'")),
        ("dspark", change_config(confidence_head_with_markov=False), ("confidence_head_with_markov",)),
    ],
)
def test_what_our_head_does_not_have_is_not_imported(
    exports: Path, tmp_path: Path, kind: str, damage: Damage, parts: tuple[str, ...]
) -> None:
    folder = copy_export(exports / kind, tmp_path / "theirs")
    damage(folder)
    with refused(*parts):
        read_draft(folder, TargetFacts.of_folder(exports / "target"))


def test_options_correct_a_folder(exports: Path, tmp_path: Path) -> None:
    folder = copy_export(exports / "native", tmp_path / "theirs")
    both(native(target_layer_ids=[1, 2]), change_config(rope_parameters={"rope_theta": 5.0}))(folder)
    options = ImportOptions(levels=(1, 2), use_target_rope=True)
    draft = read_draft(folder, TargetFacts.of_folder(exports / "target"), options)
    assert draft.levels == (1, 2) and draft.config.rope_theta == 10000.0


@pytest.mark.parametrize("kind", ["native", "dspark"])
def test_any_value_yields_findings_not_exceptions(exports: Path, tmp_path: Path, kind: str) -> None:
    folder = copy_export(exports / kind, tmp_path / "odd")
    facts = TargetFacts.of_folder(exports / "target")
    complete = json.loads((folder / "config.json").read_text())
    sections = [complete, *(part for part in complete.values() if isinstance(part, dict))]
    for section, key in [(one, key) for one in sections for key in one]:
        before = section[key]
        for value in (None, "x", 10**9, [0, "x"]):
            section[key] = value
            (folder / "config.json").write_text(json.dumps(complete))
            check_folder(folder, facts)
            with suppress(ValueError):
                read_draft(folder, facts)
        section[key] = before


def test_the_outputs_depend_on_every_tensor(exports: Path, target: sage.Target) -> None:
    assert_outputs_depend_on_every_tensor(find_format("dspark"), sage.load_draft(exports / "dspark-draft", target))

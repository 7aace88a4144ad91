"""Exports: written files, refusals, outputs after reloading, and the round trip through an import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.export_helpers import LEVELS, REDUCED, edit_json, export_draft, make_draft, outputs, save_draft
from support.messages import refused
from support.models import make_inputs

import sage
from checkpoints.export.checks import InvalidExport, check_folder
from checkpoints.export.configs import EngineConfig
from checkpoints.export.exporter import check_reload, export, find_facts
from checkpoints.export.formats.eagle3 import Eagle3Format
from checkpoints.export.formats.registry import find_format
from checkpoints.export.importer import convert
from checkpoints.export.result import ExportOptions
from sage.drafts.registry import KINDS

FAMILIES = ("qwen2_5_vl", "llava_onevision")
COMPRESSORS = [  # one without weights, one with the weights of every operator
    {"kind": "text_only"},
    {"kind": "select", "ratio": 4, "conv_ratio": 2, "queries": 2, "temperature": 1.0},
]


def written(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


class TestEagle3:
    def test_tensors_are_the_trained_ones_in_bf16(self, targets: Any, tmp_path: Path) -> None:
        draft = make_draft(targets["qwen2_5_vl"], vocabulary=REDUCED)
        draft.save_pretrained(tmp_path / "draft")
        export_draft(tmp_path / "draft", tmp_path / "out")
        _, tensors = written(tmp_path / "out")
        state = draft.state_dict()
        assert set(tensors) == set(state)
        assert torch.equal(tensors["d2t"], REDUCED - torch.arange(len(REDUCED)))
        assert tensors["t2d"].nonzero()[:, 0].tolist() == REDUCED.tolist()
        for name in set(state) - {"d2t", "t2d"}:
            assert torch.equal(tensors[name], state[name].bfloat16()), name

    def test_full_vocabulary_has_no_maps(self, targets: Any, tmp_path: Path) -> None:
        export_draft(save_draft(tmp_path / "draft", targets["qwen2_5_vl"]), tmp_path / "out")
        config, tensors = written(tmp_path / "out")
        assert not {"d2t", "t2d"} & set(tensors)
        assert config["draft_vocab_size"] == config["vocab_size"] == len(tensors["lm_head.weight"]) == 330

    def test_config_has_the_fields_that_engines_read(self, targets: Any, tmp_path: Path) -> None:
        export_draft(save_draft(tmp_path / "draft", targets["qwen2_5_vl"], vocabulary=REDUCED), tmp_path / "out")
        config, _ = written(tmp_path / "out")
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["model_type"] == "llama"
        assert config["max_position_embeddings"] == 512
        assert config["rope_scaling"] == {"type": "mrope", "rope_type": "default", "mrope_section": [2, 1, 1]}
        assert config["tie_word_embeddings"] is False
        assert "target_hidden_size" not in config
        assert config["eagle_aux_hidden_state_layer_ids"] == LEVELS
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 0, 1]

    def test_default_levels_are_not_written(self) -> None:
        from checkpoints.export.configs import TargetFacts
        from sage.drafts.eagle3 import Eagle3Config

        fingerprint = {"model_type": "qwen2_5_vl", "hidden_size": 192, "vocab_size": 1024, "num_layers": 28}
        for levels, is_default in (([2, 14, 25], True), ([1, 14, 25], False)):
            draft = Eagle3Config(feature_levels=levels, target=fingerprint, mrope_section=[4, 6, 6])
            config = find_format("eagle3").config(draft, TargetFacts.of_draft(draft), torch.bfloat16)
            written = EngineConfig(config)
            assert ("eagle_config" not in config) == is_default
            assert written.vllm_levels == written.sglang_levels == (None if is_default else levels)

    def test_plain_rope_for_llava(self, targets: Any, tmp_path: Path) -> None:
        export_draft(save_draft(tmp_path / "draft", targets["llava_onevision"]), tmp_path / "out")
        assert "rope_scaling" not in written(tmp_path / "out")[0]

    def test_embedding_option(self, targets: Any, tmp_path: Path) -> None:
        target = targets["llava_onevision"]
        export_draft(save_draft(tmp_path / "draft", target), tmp_path / "out", embedding=True)
        _, tensors = written(tmp_path / "out")
        assert torch.equal(tensors["embed_tokens.weight"], target.embed_tokens.weight.bfloat16())

    def test_embedding_of_a_target_in_the_hubs_cache(
        self, targets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[tuple[str, bool]] = []

        def snapshot(name: str, local_files_only: bool) -> str:
            calls.append((name, local_files_only))
            return targets["qwen2_5_vl"].name

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
        draft = save_draft(tmp_path / "draft", targets["qwen2_5_vl"])
        edit_json(draft / "config.json", lambda config: config.update(target_path="Qwen/Tiny"))
        export_draft(draft, tmp_path / "out", "speculators")
        assert calls == [("Qwen/Tiny", True)]
        assert "embed_tokens.weight" in written(tmp_path / "out")[1]

    def test_unavailable_embedding(self, targets: Any, tmp_path: Path) -> None:
        draft = save_draft(tmp_path / "draft", targets["qwen2_5_vl"])
        edit_json(draft / "config.json", lambda config: config.update(target_path="/gone/target"))
        with refused("embedding", "/gone/target", "--target DIR", "--no-embedding"):
            export_draft(draft, tmp_path / "out", embedding=True)
        export_draft(draft, tmp_path / "out")  # all other facts are in the draft's config


class TestSpeculators:
    def test_names_and_config(self, targets: Any, tmp_path: Path) -> None:
        target = targets["qwen2_5_vl"]
        save_draft(tmp_path / "draft", target, vocabulary=REDUCED)
        export_draft(tmp_path / "draft", tmp_path / "out", "speculators", target_name="Qwen/Qwen2.5-VL-7B-Instruct")
        config, tensors = written(tmp_path / "out")
        assert {"layers.0.hidden_norm.weight", "layers.0.self_attn.q_proj.weight", "embed_tokens.weight", "d2t"} <= set(tensors)
        assert not any(name.startswith("midlayer") for name in tensors)
        assert "model_type" not in config
        assert config["norm_before_residual"] is False
        assert config["eagle_aux_hidden_state_layer_ids"] == LEVELS
        assert config["speculators_config"]["verifier"] == {
            "name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct",
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        }
        assert config["transformer_layer_config"]["vocab_size"] == 330


class TestEagle:
    def test_flavours_differ_in_class_and_bias(self, targets: Any, tmp_path: Path) -> None:
        draft = save_draft(tmp_path / "draft", targets["qwen2_5_vl"], "eagle")
        for flavour, name in (("vllm", "EagleLlamaForCausalLM"), ("sglang", "LlamaForCausalLMEagle")):
            export_draft(draft, tmp_path / flavour, "eagle", flavour=flavour)
            config, tensors = written(tmp_path / flavour)
            assert config["architectures"] == [name]
            assert "layers.0.self_attn.q_proj.weight" in tensors
            assert not any("input_layernorm" in key or "lm_head" in key or "d2t" in key for key in tensors)
            assert ("fc.bias" in tensors) == (flavour == "sglang")
        assert not tensors["fc.bias"].any()

    def test_missing_flavour(self, targets: Any, tmp_path: Path) -> None:
        draft = save_draft(tmp_path / "draft", targets["qwen2_5_vl"], "eagle")
        with refused("--flavour", "vllm, sglang"):
            export(draft, tmp_path / "out", "eagle")


class TestRefusals:
    @pytest.mark.parametrize(
        ("kind", "trained", "edited", "parts"),
        [
            ("eagle", {"input_norm": True}, {}, ("draft.input_norm: true", "draft.input_norm=false")),
            ("eagle3", {"rope_theta": 5000.0}, {}, ("draft.rope_theta: 5000.0", "10000.0")),
            *(
                ("eagle3", {"feature_levels": levels}, {}, ("draft.feature_levels", str(levels), "0..2"))
                for levels in ([1, 2, 3], [0, 1], [2, 1, 0])
            ),
            ("eagle3", {}, {"second_head": 7}, ("draft.second_head: 7", "eagle3")),  # new fields, until an exporter writes them
        ],
    )
    def test_settings_that_engines_do_not_read(
        self, targets: Any, tmp_path: Path, kind: str, trained: dict[str, Any], edited: dict[str, Any], parts: tuple[str, ...]
    ) -> None:
        draft = save_draft(tmp_path / "draft", targets["qwen2_5_vl"], kind, **trained)
        edit_json(draft / "config.json", lambda config: config.update(edited))
        with refused(*parts):
            export_draft(draft, tmp_path / "out", kind)
        assert not (tmp_path / "out").exists()

    def test_unserved_family(self, targets: Any, tmp_path: Path) -> None:
        draft = save_draft(tmp_path / "draft", targets["llava_onevision"])
        with refused("llava_onevision", "--allow-unserved"):
            export(draft, tmp_path / "out", "eagle3")
        done = export(draft, tmp_path / "out", "eagle3", ExportOptions(allow_unserved=True))
        assert any("llava_onevision" in warning for warning in done.warnings)
        card = (tmp_path / "out" / "README.md").read_text()
        served = f"sage-serve --target {targets['llava_onevision'].name} --draft {tmp_path / 'out'} --port 8000"
        assert "No engine serves drafts for llava_onevision." in card and served in card

    def test_a_format_for_another_kind_of_head(self, targets: Any, tmp_path: Path) -> None:
        draft = save_draft(tmp_path / "draft", targets["qwen2_5_vl"], "eagle")
        with refused("--format eagle3", "draft=eagle;", "its formats: eagle"):
            export_draft(draft, tmp_path / "out")
        with refused("--format gguf", "eagle3, speculators, eagle, "):
            export_draft(draft, tmp_path / "out", "gguf")
        with refused("--flavour vllm", "eagle3"):
            export_draft(save_draft(tmp_path / "d3", targets["qwen2_5_vl"]), tmp_path / "out", flavour="vllm")

    @pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda config: config["kind"])
    @pytest.mark.parametrize("format_", [*KINDS["eagle"].export_formats, *KINDS["eagle3"].export_formats])
    def test_compressor(self, targets: Any, tmp_path: Path, format_: str, compressor: dict[str, Any]) -> None:
        """Refused by every format; with allow_uncompressed, exported without the compressor's tensors."""
        kind = "eagle" if format_ == "eagle" else "eagle3"
        trained = make_draft(targets["qwen2_5_vl"], kind, compressor=compressor)
        trained.save_pretrained(tmp_path / "draft")
        with refused("draft.compressor", compressor["kind"], "--allow-uncompressed"):
            export_draft(tmp_path / "draft", tmp_path / "out", format_)
        assert not (tmp_path / "out").exists()
        done = export_draft(tmp_path / "draft", tmp_path / "out", format_, allow_uncompressed=True)
        (warning,) = [warning for warning in done.warnings if "visual compressor" in warning]
        assert f"({compressor['kind']}" in warning
        assert warning in (tmp_path / "out" / "README.md").read_text()
        about, tensors = json.loads((tmp_path / "out" / "sage_export.json").read_text()), written(tmp_path / "out")[1]
        assert warning in about["warnings"]
        assert not [name for name in tensors if "compressor" in name]
        own = {name: weight for name, weight in trained.named_parameters() if not name.startswith("compressor.")}
        assert about["parameters"] == sum(weight.numel() for weight in own.values())
        assert all(any(torch.equal(weight.bfloat16(), tensor) for tensor in tensors.values()) for weight in own.values())

    def test_norm_before_residual(self, targets: Any, tmp_path: Path) -> None:
        draft = save_draft(tmp_path / "draft", targets["qwen2_5_vl"])
        edit_json(draft / "config.json", lambda config: config.update(norm_before_residual=True))
        with refused("draft.norm_before_residual: true", "SGLang", "--format speculators"):
            export_draft(draft, tmp_path / "out")
        done = export_draft(draft, tmp_path / "out", "speculators")
        assert [finding.where for finding in done.check.warnings] == ["norm_before_residual"]

    def test_another_target(self, targets: Any, tmp_path: Path) -> None:
        draft = save_draft(tmp_path / "draft", targets["qwen2_5_vl"])
        with refused("--target", "llava_onevision", "qwen2_5_vl"):
            export_draft(draft, tmp_path / "out", target=targets["llava_onevision"].name)

    def test_folders_without_a_draft(self, targets: Any, tmp_path: Path) -> None:
        for folder, part in (
            (Path(targets["qwen2_5_vl"].name), "not a draft head"),
            (tmp_path, "config.json"),
            (tmp_path / "gone", "no such folder"),
        ):
            with refused(str(folder), part):
                export_draft(folder, tmp_path / "out")

    def test_a_draft_whose_weights_do_not_fit(self, targets: Any, tmp_path: Path) -> None:
        draft = save_draft(tmp_path / "draft", targets["qwen2_5_vl"])
        tensors = load_file(draft / "model.safetensors")
        tensors.pop("norm.weight")
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        with refused(str(draft), "norm.weight"):
            export_draft(draft, tmp_path / "out")

    def test_existing_folders(self, targets: Any, tmp_path: Path) -> None:
        draft = save_draft(tmp_path / "draft", targets["qwen2_5_vl"])
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.tex").write_text("text")
        for overwrite in (False, True):
            with refused("--out", "mine", "not written by sage-export"):
                export_draft(draft, tmp_path / "mine", overwrite=overwrite)
        export_draft(draft, tmp_path / "out")
        with refused("--out", "--overwrite"):
            export_draft(draft, tmp_path / "out")
        export_draft(draft, tmp_path / "out", dtype=torch.float32, overwrite=True)
        assert written(tmp_path / "out")[1]["fc.weight"].dtype == torch.float32


class TestReload:
    def test_invalid_export_is_discarded(self, targets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The validator runs on the written files."""
        monkeypatch.setattr(Eagle3Format, "tensors", lambda self, state, dtype: {"fc.weight": state["fc.weight"]})
        draft = save_draft(tmp_path / "draft", targets["qwen2_5_vl"])
        with refused("lm_head.weight: missing", "acceptance 1.00", error=InvalidExport):
            export_draft(draft, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]

    def test_export_with_other_outputs_is_discarded(
        self, targets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Names, shapes and value ranges are valid; only two tensors are swapped."""

        def swapped(tensors: dict[str, torch.Tensor], path: Path, metadata: Any) -> None:
            gate, up = "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"
            save_file({**tensors, gate: tensors[up], up: tensors[gate]}, path, metadata=metadata)

        monkeypatch.setattr("checkpoints.export.exporter.save_file", swapped)
        draft = save_draft(tmp_path / "draft", targets["qwen2_5_vl"])
        with refused(str(tmp_path / "out"), "outputs differ", error=InvalidExport):
            export_draft(draft, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]

    def test_rounding_is_measured(self, targets: Any, tmp_path: Path) -> None:
        draft = save_draft(tmp_path / "draft", targets["qwen2_5_vl"])
        exact = export_draft(draft, tmp_path / "exact", dtype=torch.float32).rounding
        rounded = export_draft(draft, tmp_path / "rounded").rounding
        assert exact.max_abs_difference == 0
        assert exact.agreement == 1
        assert 0 < rounded.max_abs_difference < 0.5  # bf16 keeps 8 bits: 1/256 of logits that are about ten here, and some sums

    def test_one_changed_weight_is_detected(self, targets: Any, tmp_path: Path) -> None:
        draft = make_draft(targets["qwen2_5_vl"])
        draft.save_pretrained(tmp_path / "draft")
        out = export_draft(tmp_path / "draft", tmp_path / "out", dtype=torch.float32).folder
        facts = find_facts(draft.config, None)
        check_reload(out, find_format("eagle3"), draft, facts)
        draft.midlayer.mlp.down_proj.weight.data[3, 5] += 0.01
        with refused("outputs differ", error=InvalidExport):
            check_reload(out, find_format("eagle3"), draft, facts)


def draft_of_answer(target: sage.Target, answer: torch.Tensor, is_reduced: bool) -> Any:
    """Returns a random draft that proposes only tokens of the answer, so that some proposals are accepted."""
    tokens = answer.unique()
    draft = make_draft(target, vocabulary=tokens if is_reduced else None)
    if not is_reduced:
        others = torch.ones(target.vocab_size, dtype=torch.bool)
        others[tokens] = False
        draft.lm_head.weight.data[others] = 0
    return draft


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("is_reduced", "format_", "dtype"),
    [(False, "eagle3", torch.float32), (True, "eagle3", torch.float32), (True, "speculators", torch.bfloat16)],
)
def test_export_import_decode_is_the_same(
    targets: Any, tmp_path: Path, family: str, is_reduced: bool, format_: str, dtype: torch.dtype
) -> None:
    """Tokens and every round's acceptance; in bf16 compared with the trained draft rounded the same way."""
    target = targets[family]
    inputs = make_inputs(target)
    answer = sage.generate(target, None, inputs, policy="autoregressive", max_new_tokens=12).tokens
    draft = draft_of_answer(target, answer, is_reduced)
    draft.save_pretrained(tmp_path / "draft")
    export_draft(tmp_path / "draft", tmp_path / "out", format_, dtype=dtype)
    back = sage.load_draft(convert(tmp_path / "out", target.name, tmp_path / "back"), target)
    before = draft.to(dtype).to(torch.float32)
    assert torch.equal(outputs(before), outputs(back))
    plain, again = (sage.generate(target, d, inputs, policy="static", max_new_tokens=12) for d in (before, back))
    assert torch.equal(plain.tokens, answer)
    assert torch.equal(again.tokens, answer)
    assert plain.stats.accepted == again.stats.accepted
    assert sum(plain.stats.accepted) > 0


def test_an_export_of_an_import_is_bit_identical(targets: Any, tmp_path: Path) -> None:
    draft = save_draft(tmp_path / "draft", targets["qwen2_5_vl"], vocabulary=REDUCED)
    export_draft(draft, tmp_path / "one")
    convert(tmp_path / "one", targets["qwen2_5_vl"].name, tmp_path / "back")
    export_draft(tmp_path / "back", tmp_path / "two")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert not check_folder(tmp_path / "two").findings

"""Exports of every kind of draft in every format: written files, refusals, the reload check, and the way back by an import."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.export_helpers import BLOCK, EXPORTS, MASK, REDUCED, edit_json, export_draft, make_draft, save_draft
from support.messages import refused
from transformers import Qwen3Config

import sage
from checkpoints.export.configs import EngineConfig
from checkpoints.export.exporter import ExportOptions, check_reload, export, find_facts, speed_warnings
from checkpoints.export.folder import verify_export
from checkpoints.export.formats import find_format, variants
from checkpoints.export.formats.eagle import Eagle3Format
from checkpoints.export.importer import InvalidExport, check_folder, convert
from checkpoints.export.serving import serving_line
from checkpoints.export.target import TargetFacts
from sage.drafts.eagle import Eagle3Config
from sage.drafts.head import DraftHead
from sage.io.folders import restore_interrupted
from sage.io.manifest import CorruptFolder

LAYER = "transformer_layer_config"
KNOWN = yaml.safe_load(Path(__file__).with_name("exports.yaml").read_text(encoding="utf-8"))


def written(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


class TestWritten:
    @pytest.mark.parametrize("name", EXPORTS)
    def test_fields_and_shapes_are_those_that_engines_have_read(self, exports: Path, target: sage.Target, name: str) -> None:
        config, tensors = written(exports / name)
        known = json.loads(json.dumps(config).replace(str(target.name), "TARGET"))
        assert known == KNOWN[name]["config"]
        assert {key: [*tensor.shape] for key, tensor in tensors.items()} == KNOWN[name]["shapes"]

    def test_tensors_are_the_trained_ones_in_bf16(self, exports: Path, target: sage.Target) -> None:
        state, (_, tensors) = sage.load_draft(exports / "eagle3-draft", target).state_dict(), written(exports / "eagle3")
        assert set(tensors) == set(state)
        assert torch.equal(tensors["d2t"], REDUCED - torch.arange(len(REDUCED)))
        assert tensors["t2d"].nonzero()[:, 0].tolist() == REDUCED.tolist()
        assert all(torch.equal(tensors[name], state[name].bfloat16()) for name in set(state) - {"d2t", "t2d"})
        assert not written(exports / "sglang")[1]["fc.bias"].any()

    def test_tables_of_the_target(self, exports: Path, target: sage.Target) -> None:
        assert torch.equal(written(exports / "reduced")[1]["lm_head.weight"], target.lm_head.weight[REDUCED])
        draft, expected = sage.load_draft(exports / "peagle-draft", target), target.embed_tokens.weight.detach().clone()
        expected[MASK] = draft.mask_embedding[0, 0]
        tensors = written(exports / "peagle")[1]
        assert torch.equal(tensors["embed_tokens.weight"], expected)
        assert torch.equal(tensors["layers.1.mlp.up_proj.weight"], draft.layers[0].mlp.up_proj.weight)
        layer = written(exports / "reduced")[0][LAYER]
        assert Qwen3Config(**layer).rope_parameters["rope_theta"] == 10000.0

    def test_default_levels_are_not_written(self) -> None:
        fingerprint = {"model_type": "qwen2_5_vl", "hidden_size": 192, "vocab_size": 1024, "num_layers": 28}
        for levels, is_default in (([2, 14, 25], True), ([1, 14, 25], False)):
            draft = Eagle3Config(feature_levels=levels, target=fingerprint, mrope_section=[4, 6, 6])
            config = find_format("eagle3").config(draft, TargetFacts.of_draft(draft), torch.bfloat16)
            read = EngineConfig(config)
            assert ("eagle_config" not in config) == is_default
            assert read.vllm_levels == read.sglang_levels == (None if is_default else levels)

    def test_options(self, targets: Any, tmp_path: Path) -> None:
        """A full vocabulary needs no maps, LLaVA no axes; the embedding and the target's name are written if asked for."""
        target = targets["llava_onevision"]
        name = {"target_name": "llava-hf/tiny"}
        export_draft(save_draft(tmp_path / "draft", target), tmp_path / "out", embedding=True)
        export_draft(tmp_path / "draft", tmp_path / "named", "speculators", **name)
        config, tensors = written(tmp_path / "out")
        assert "rope_scaling" not in config and not {"d2t", "t2d"} & set(tensors)
        assert config["draft_vocab_size"] == config["vocab_size"] == len(tensors["lm_head.weight"]) == 330
        assert torch.equal(tensors["embed_tokens.weight"], target.embed_tokens.weight.bfloat16())
        verifier = {"name_or_path": "llava-hf/tiny", "architectures": ["LlavaOnevisionForConditionalGeneration"]}
        assert written(tmp_path / "named")[0]["speculators_config"]["verifier"] == verifier

    def test_unavailable_embedding(self, target: sage.Target, tmp_path: Path) -> None:
        draft = save_draft(tmp_path / "draft", target)
        edit_json(draft / "config.json", lambda config: config.update(target_path="/gone/target"))
        with refused("embedding", "/gone/target", "--target DIR", "--no-embedding"):
            export_draft(draft, tmp_path / "out", embedding=True)
        export_draft(draft, tmp_path / "out")  # all other facts are in the draft's config


# kind of draft, its options, changes of its config.json, format, flavour; parts of the refusal
OBSTACLES: list[tuple[Any, ...]] = [
    ("eagle", {"input_norm": True}, {}, "eagle", "vllm", ("draft.input_norm: true", "--flavour plugin")),
    ("eagle", {}, {}, "eagle", "plugin", ("--flavour plugin", "no norm", "--flavour vllm")),
    ("eagle", {}, {}, "eagle3", None, ("--format eagle3", "draft=eagle;", "its formats: eagle")),
    ("eagle3", {"rope_theta": 5000.0}, {}, "eagle3", None, ("draft.rope_theta: 5000.0", "10000.0")),
    ("eagle3", {"feature_levels": [1, 2, 3]}, {}, "eagle3", None, ("draft.feature_levels", "[1, 2, 3]", "0..2")),
    ("eagle3", {}, {"second_head": 7}, "eagle3", None, ("draft.second_head: 7", "eagle3")),  # until an exporter writes it
    ("eagle3", {}, {"norm_before_residual": True}, "eagle3", None, ("draft.norm_before_residual", "--format speculators")),
    ("eagle3", {}, {}, "onnx", None, ("--format onnx", "eagle3, speculators, eagle, ")),
    ("block", {"feed": True}, {}, "dflash", None, ("draft.feed: true", "draft.feed=false")),
    ("block", {"conditional": "mlp"}, {}, "dflash", None, ("draft.conditional: mlp", "conditional=none or markov")),
    ("block", {"conditional": "markov"}, {}, "dflash", None, ("draft.conditional: markov", "--format dspark")),
    ("block", {"feature_levels": [1, 3]}, {}, "dflash", None, ("draft.feature_levels: [1, 3]", "final norm", "0..2")),
    ("block", {"feature_levels": [0, 2]}, {}, "dflash", "native", ("draft.feature_levels", "embeddings", "--flavour")),
    ("block", {"vocabulary": REDUCED}, {}, "dflash", "native", ("draft.draft_vocab_size: 109", "without --flavour")),
    ("block", {}, {}, "dflash", "vllm", ("--flavour vllm", "unknown", "native")),
]


class TestRefusals:
    @pytest.mark.parametrize("row", OBSTACLES, ids=lambda row: f"{row[0]}-{row[5][0]}")
    def test_what_engines_cannot_compute_is_refused_by_name(self, target: sage.Target, tmp_path: Path, row: Any) -> None:
        kind, trained, edited, format_, flavour, parts = row
        draft = save_draft(tmp_path / "draft", target, kind, **((BLOCK if kind == "block" else {}) | trained))
        edit_json(draft / "config.json", lambda config: config.update(edited))
        with refused(*parts):
            export(draft, tmp_path / "out", format_, ExportOptions(flavour=flavour))
        assert not (tmp_path / "out").exists()

    def test_no_embedding_for_a_draft_with_a_row_of_its_own(self, exports: Path, tmp_path: Path) -> None:
        with refused("--no-embedding", "mask token"):
            export_draft(exports / "peagle-draft", tmp_path / "out", "peagle", embedding=False)

    def test_unserved_family(self, unserved: sage.Target, tmp_path: Path) -> None:
        draft = save_draft(tmp_path / "draft", unserved)
        with refused("llava_onevision", "--allow-unserved"):
            export(draft, tmp_path / "out", "eagle3")
        done = export(draft, tmp_path / "out", "eagle3", ExportOptions(allow_unserved=True))
        assert any("llava_onevision" in warning for warning in done.warnings)
        card = (tmp_path / "out" / "README.md").read_text()
        served = f"sage-serve --target {unserved.name} --draft {tmp_path / 'out'} --port 8000"
        assert "No engine serves drafts for llava_onevision." in card and served in card

    @pytest.mark.parametrize("kind", ["eagle", "eagle3"])
    def test_compressor(self, target: sage.Target, tmp_path: Path, kind: str) -> None:
        """Refused; with allow_uncompressed, exported without the compressor's tensors."""
        every = {"kind": "select", "ratio": 4, "conv_ratio": 2, "queries": 2, "temperature": 1.0}  # has all operators' weights
        trained = make_draft(target, kind, compressor=every)
        trained.save_pretrained(tmp_path / "draft")
        with refused("draft.compressor", "select", "--allow-uncompressed"):
            export_draft(tmp_path / "draft", tmp_path / "out", kind)
        done = export_draft(tmp_path / "draft", tmp_path / "out", kind, allow_uncompressed=True)
        (warning,) = [warning for warning in done.warnings if "visual compressor (select" in warning]
        assert warning in (tmp_path / "out" / "README.md").read_text()
        about, tensors = json.loads((tmp_path / "out" / "sage_export.json").read_text()), written(tmp_path / "out")[1]
        assert warning in about["warnings"]
        own = {name: weight for name, weight in trained.named_parameters() if not name.startswith("compressor.")}
        assert about["parameters"] == sum(weight.numel() for weight in own.values())
        assert all(any(torch.equal(weight.bfloat16(), tensor) for tensor in tensors.values()) for weight in own.values())

    def test_folders_that_cannot_be_exported(self, targets: Any, target: sage.Target, tmp_path: Path) -> None:
        draft = save_draft(tmp_path / "draft", target)
        with refused("--target", "llava_onevision", "qwen2_5_vl"):
            export_draft(draft, tmp_path / "out", target=targets["llava_onevision"].name)
        for folder, part in (
            (Path(str(target.name)), "not a draft head"),
            (tmp_path, "config.json"),
            (tmp_path / "gone", "no such folder"),
        ):
            with refused(str(folder), part):
                export_draft(folder, tmp_path / "out")
        tensors = load_file(draft / "model.safetensors")
        tensors.pop("norm.weight")
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        with refused(str(draft), "norm.weight"):
            export_draft(draft, tmp_path / "out")

    def test_existing_folders(self, target: sage.Target, tmp_path: Path) -> None:
        draft = save_draft(tmp_path / "draft", target)
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


def test_engines_of_block_drafts(target: sage.Target) -> None:
    """The line of a run names the format or the remedy; SGLang serves the native layout where it captures levels."""

    def line_of(**options: Any) -> str:
        return serving_line(make_draft(target, "block", **(BLOCK | options)), target.model.config)

    assert line_of().startswith("can be served by vLLM (sage-export --format dflash)")
    assert "vLLM (sage-export --format dspark)" in line_of(conditional="markov")
    assert "not by vLLM" in line_of(feed=True) and "draft.feed=false" in line_of(feed=True)
    facts = TargetFacts.of_folder(str(target.name))
    plain, native = variants(["dflash"])
    assert plain.served_by(facts) == native.served_by(facts) == ("vLLM",)
    spoken = replace(facts, model_type="qwen3", mrope_section=None)
    assert plain.served_by(spoken) == ("vLLM",) and native.served_by(spoken) == ("vLLM", "SGLang")
    assert "--speculative-algorithm DFLASH" in native.serve_command("SGLang", "T", "D", 3)
    assert not find_format("peagle").warnings(None, spoken)


def test_a_draft_slower_than_none_is_exported_with_a_warning() -> None:
    report = {"policies": {"autoregressive": {"speedup": 1.0}, "chain": {"speedup": 0.48}, "sage": {"speedup": 0.26}}}
    assert "0.48x at best" in speed_warnings(report)[0]
    report["policies"]["chain"]["speedup"] = 1.2
    assert speed_warnings(report) == speed_warnings({}) == []


class TestReload:
    def test_invalid_export_is_discarded(self, target: sage.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The validator runs on the written files."""
        monkeypatch.setattr(Eagle3Format, "tensors", lambda self, state, dtype: {"fc.weight": state["fc.weight"]})
        draft = save_draft(tmp_path / "draft", target)
        with refused("lm_head.weight: missing", "acceptance 1.00", error=InvalidExport):
            export_draft(draft, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]

    def test_export_with_other_outputs_is_discarded(self, target, tmp_path, monkeypatch):
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
        exact = export_draft(draft, tmp_path / "exact", dtype=torch.float32)
        rounded = export_draft(draft, tmp_path / "rounded")
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


# -- complete or absent -------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """Simulates the death of the process: no clean-up runs."""


def intact(folder: Path) -> bytes:
    """Returns the weights of an export without findings."""
    assert not check_folder(folder).findings
    verify_export(folder)
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("error", [Crash(), OSError(28, "No space left on device")], ids=["crash", "full disk"])
@pytest.mark.parametrize("step", ["save_file", "check_reload", "write_text"])
def test_an_interrupted_export_leaves_the_existing_one(exports, tmp_path, monkeypatch, step, error):
    """The faults of `new_folder`, by which it is written, are those of test_store.py, at every system call."""
    draft, out = exports / "eagle3-draft", tmp_path / "place" / "out"
    old = intact(export_draft(draft, out, dtype=torch.float32).folder)

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(f"checkpoints.export.exporter.{step}", fail)
        export_draft(draft, out, overwrite=True)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    restore_interrupted(out)
    assert intact(out) == old
    assert intact(export_draft(draft, out, overwrite=True).folder) == intact(exports / "eagle3") != old
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(("left", "kept"), [([".out.old"], ".out.old"), ([".out.old", "out"], "out")])
def test_a_crash_between_two_renames_leaves_one_whole_folder(tmp_path: Path, left: list[str], kept: str) -> None:
    for name in left:
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(name)
    restore_interrupted(tmp_path / "out")
    assert (tmp_path / "out" / "name").read_text() == kept
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "sage_export.json", "README.md"])
def test_a_corrupt_file_is_named(exports: Path, tmp_path: Path, name: str) -> None:
    out = Path(shutil.copytree(exports / "eagle3", tmp_path / "out"))
    content = bytearray((out / name).read_bytes())
    content[30] ^= 1
    (out / name).write_bytes(content)
    assert f"{name}: corrupt" in str(check_folder(out).errors[0])
    (out / name).unlink()
    assert f"{name}: missing" in str(check_folder(out).errors[0])


def test_the_step_of_a_manifest_is_that_of_the_export(exports: Path, tmp_path: Path) -> None:
    """No file's hash depends on it."""
    out = Path(shutil.copytree(exports / "eagle3", tmp_path / "out"))
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | {"step": 7}, indent=1) + "\n")
    with refused("manifest.json: corrupt: step 7, 0 in", error=CorruptFolder):
        verify_export(out)

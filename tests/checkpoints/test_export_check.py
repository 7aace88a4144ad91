"""The validator finds and names every known way in which a draft breaks in serving, and accepts intact exports."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.export_helpers import REDUCED, edit_json, export_draft, save_draft, save_target
from support.messages import check_message, refused

from checkpoints.export.checks import InvalidExport, check_folder
from checkpoints.export.configs import TargetFacts
from checkpoints.export.formats.registry import FORMATS
from checkpoints.export.importer import read_draft

KINDS = ("eagle3", "speculators", "vllm", "sglang")
AUX = "eagle_aux_hidden_state_layer_ids"
Corruption = Callable[[Path], None]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One intact export of each kind, and their target."""
    folder = tmp_path_factory.mktemp("exports")
    target = save_target(folder / "target")
    save_draft(folder / "three", target, vocabulary=REDUCED)
    save_draft(folder / "one", target, "eagle")
    for kind in ("eagle3", "speculators"):
        export_draft(folder / "three", folder / kind, kind)
    for flavour in FORMATS["eagle"].flavours:
        export_draft(folder / "one", folder / flavour, "eagle", flavour=flavour)
    return folder


def without_manifest(exports: Path, kind: str, out: Path) -> Path:
    """Copies an export without its manifest, so that changes are not reported as corruption."""
    shutil.copytree(exports / kind, out)
    (out / "manifest.json").unlink()
    return out


def config(**changes: Any) -> Corruption:
    """Fields set to other values; `...` removes one."""

    def apply(content: dict[str, Any]) -> None:
        content.update(changes)
        for key in [key for key, value in changes.items() if value is ...]:
            content.pop(key)

    return lambda folder: edit_json(folder / "config.json", apply)


def nested(section: str, **changes: Any) -> Corruption:
    """Fields of a section of config.json."""
    return lambda folder: edit_json(folder / "config.json", lambda content: content[section].update(changes))


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Corruption:
    """Tensors changed in the file."""

    def apply(folder: Path) -> None:
        content = load_file(folder / "model.safetensors")
        change(content)
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, folder / "model.safetensors")

    return apply


def put(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Corruption:
    """One tensor replaced by a function of itself."""
    return tensors(lambda content: content.update({name: value(content[name])}))


def drop(name: str) -> Corruption:
    return tensors(lambda content: content.pop(name))


def add(name: str, shape: tuple[int, ...] = (32,)) -> Corruption:
    return tensors(lambda content: content.update({name: torch.ones(shape, dtype=torch.bfloat16)}))


def prefixed(content: dict[str, torch.Tensor]) -> None:
    for name in list(content):
        content[f"model.{name}"] = content.pop(name)


def text(name: str, content: str) -> Corruption:
    return lambda folder: (folder / name).write_text(content) and None


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def sharded(*names: str) -> Corruption:
    def apply(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: name for name in names}}))

    return apply


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (exec, ("raise SystemExit('a pickle ran')",))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Evil()}, folder / "pytorch_model.bin")


def nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[5] = torch.nan
    return tensor


def repeated(d2t: torch.Tensor) -> torch.Tensor:
    d2t[7] = d2t[6] - 1
    return d2t


# kind of export, change, where the finding must be, values that its text must contain
CORRUPTIONS: dict[str, tuple[str, Corruption, str, tuple[str, ...]]] = {
    "no lm_head": ("eagle3", drop("lm_head.weight"), "lm_head.weight", ("missing", "acceptance 1.00, no error")),
    "no d2t": ("eagle3", drop("d2t"), "d2t", ("missing", "acceptance 1.00, no error")),
    "absolute d2t": ("eagle3", put("d2t", lambda d: d + torch.arange(len(d))), "d2t", ("absolute", "offsets")),
    "d2t out of range": ("eagle3", put("d2t", lambda d: d + 200), "d2t", ("203 to 527", "0 to 329")),
    "duplicates in d2t": ("eagle3", put("d2t", repeated), "d2t", ("1 draft ids",)),
    "d2t in int32": ("eagle3", put("d2t", lambda d: d.int()), "d2t", ("int32", "int64")),
    "t2d of another vocabulary": ("eagle3", put("t2d", lambda t: t.roll(1)), "t2d", ("109 ids", "0 of them")),
    "no fc": ("eagle3", drop("fc.weight"), "fc.weight", ("missing", "acceptance falls to 1.00")),
    "fc of two levels": ("eagle3", put("fc.weight", lambda w: w[:, :64]), "fc.weight", ("[32, 64]", "[32, 96]")),
    "NaN": ("eagle3", put("midlayer.mlp.up_proj.weight", nan), "midlayer.mlp.up_proj.weight", ("1 values", "finite")),
    "ZeRO-3 saved zeros": ("eagle3", put("norm.weight", torch.zeros_like), "norm.weight", ("zero", "ZeRO-3")),
    "ZeRO-3 saved an empty tensor": ("eagle3", put("fc.weight", lambda w: w[:0, 0]), "fc.weight", ("shape [0]",)),
    "an extra tensor": ("eagle3", add("embed_norm.weight"), "embed_norm.weight", ("vLLM", "SGLang")),
    "prefix model.": ("eagle3", tensors(prefixed), "model.d2t", ("'model.'",)),
    "integer weights": ("eagle3", put("fc.weight", lambda w: w.int()), "fc.weight", ("int32", "float")),
    "short context": ("eagle3", config(max_position_embeddings=256), "max_position_embeddings", ("256", "512")),
    "no context": ("eagle3", config(max_position_embeddings=...), "max_position_embeddings", ("2048",)),
    "other rope": ("eagle3", config(rope_theta=1e6), "rope_theta", ("1e+06", "10000")),
    "plain rope": ("eagle3", config(rope_scaling=None), "rope_scaling", ("mrope_section None", "[2, 1, 1]")),
    "scaled rope": (
        "eagle3",
        config(rope_scaling={"rope_type": "yarn", "mrope_section": [2, 1, 1]}),
        "rope_scaling",
        ("'yarn'", "unscaled"),
    ),
    "levels for SGLang off by one": (
        "eagle3",
        nested("eagle_config", **{AUX: [0, 1, 2]}),
        f"{AUX} and eagle_config.{AUX}",
        ("vLLM reads hidden_states[0, 1, 2]", "SGLang reads hidden_states[1, 2, 3]"),
    ),
    "levels for vLLM only": (
        "eagle3",
        config(eagle_config=...),
        f"{AUX} and eagle_config.{AUX}",
        ("SGLang reads hidden_states[2, 1, 0]",),
    ),
    "two levels": ("eagle3", config(**{AUX: [0, 1]}), AUX, ("3 levels",)),
    "a level after the last layer": ("eagle3", config(**{AUX: [0, 1, 3]}), AUX, ("3 layers", "0 to 2")),
    "other vocabulary": ("eagle3", config(vocab_size=331), "vocab_size", ("331", "330")),
    "no draft_vocab_size": ("eagle3", config(draft_vocab_size=...), "draft_vocab_size", ("None", "SGLang")),
    "tied": ("eagle3", config(tie_word_embeddings=True), "tie_word_embeddings", ("True", "false", "SGLang")),
    "the target's layer count": ("eagle3", config(num_hidden_layers=28), "num_hidden_layers", ("28", "1")),
    "null target_hidden_size": ("eagle3", config(target_hidden_size=None), "target_hidden_size", ("null", "SGLang")),
    "other target_hidden_size": ("eagle3", config(target_hidden_size=64), "target_hidden_size", ("64", "32")),
    "norm_before_residual": ("eagle3", config(norm_before_residual=True), "norm_before_residual", ("True", "SGLang")),
    "biases": ("eagle3", config(attention_bias=True), "attention_bias", ("True", "false")),
    "another activation": ("eagle3", config(hidden_act="gelu"), "hidden_act", ("'gelu'", "'silu'")),
    "heads that do not divide": ("eagle3", config(num_key_value_heads=3), "num_key_value_heads", ("3", "4 heads")),
    "a missing size": ("eagle3", config(intermediate_size=...), "intermediate_size", ("None", "positive")),
    "SafeAILab's class": ("eagle3", config(architectures=["LlamaForCausalLM"]), "architectures", ("vLLM", "SGLang")),
    "no class of a draft": (
        "eagle3",
        config(architectures=["X"], draft_vocab_size=...),
        "architectures",
        ("['X']", "LlamaForCausalLMEagle3"),
    ),
    "another model_type": ("eagle3", config(model_type="qwen2"), "model_type", ("'qwen2'", "llama")),
    "code to run": ("eagle3", config(auto_map={"AutoModel": "x.Y"}), "auto_map", ("trust_remote_code",)),
    "quantized": ("eagle3", config(quantization_config={"bits": 4}), "quantization_config", ("present",)),
    "config that is not JSON": ("eagle3", text("config.json", '{"architectures": ['), "config.json", ("cannot read",)),
    "config that is a list": ("eagle3", text("config.json", "[]"), "config.json", ("list",)),
    "no config": ("eagle3", lambda folder: (folder / "config.json").unlink(), "config.json", ("missing",)),
    "no target facts": ("eagle3", text("sage_export.json", "{}"), "sage_export.json", ("architecture",)),
    "facts of another type": (
        "eagle3",
        lambda folder: edit_json(folder / "sage_export.json", lambda content: content["target"].update(num_layers="x")),
        "sage_export.json",
        ("num_layers", "'x'", "int"),
    ),
    "no weights": ("eagle3", lambda folder: (folder / "model.safetensors").unlink(), "weights", ("pytorch_model.bin",)),
    "half a file": ("eagle3", truncated, "weights", ("model.safetensors", "corrupt")),
    "a pickle that runs code": ("eagle3", pickled, "weights", ("pytorch_model.bin", "use safetensors")),
    "a shard outside": ("eagle3", sharded("../../etc/passwd"), "weights", ("'../../etc/passwd'", "outside")),
    "a shard lost": ("eagle3", sharded("model-00001-of-00002.safetensors"), "weights", ("00001-of-00002", "missing")),
    "residual not specified": ("speculators", config(norm_before_residual=...), "norm_before_residual", ("missing", "true")),
    "a model_type on top": ("speculators", config(model_type="llama"), "model_type", ("'llama'",)),
    "no verifier": ("speculators", nested("speculators_config", verifier={}), "speculators_config.verifier", ("{}",)),
    "no proposals": ("speculators", config(speculators_config=...), "speculators_config", ("None", "verifier")),
    "unknown proposal": (
        "speculators",
        nested("speculators_config", default_proposal_method="tree"),
        "speculators_config.default_proposal_method",
        ("'tree'", "greedy"),
    ),
    "another algorithm": ("speculators", config(speculators_model_type="mtp"), "speculators_model_type", ("'eagle3'",)),
    "no layer": ("speculators", config(transformer_layer_config=...), "transformer_layer_config", ("missing",)),
    "nested rope": (
        "speculators",
        nested("transformer_layer_config", rope_theta=5.0),
        "transformer_layer_config.rope_theta",
        ("5", "10000"),
    ),
    "fc_norm": ("speculators", config(fc_norm=True), "fc_norm", ("True", "SGLang")),
    "no t2d": ("speculators", drop("t2d"), "t2d", ("missing", "speculators")),
    "names of eagle3": (
        "speculators",
        tensors(lambda c: c.update({"midlayer.hidden_norm.weight": c.pop("layers.0.hidden_norm.weight")})),
        "layers.0.hidden_norm.weight",
        ("missing",),
    ),
    "bias in vLLM's flavour": ("vllm", add("fc.bias"), "fc.bias", ("unexpected",)),
    "no bias in SGLang's flavour": ("sglang", drop("fc.bias"), "fc.bias", ("missing", "SGLang")),
    "an input norm": ("vllm", add("layers.0.input_layernorm.weight"), "layers.0.input_layernorm.weight", ("unexpected",)),
    "an own lm_head": ("sglang", add("lm_head.weight", (330, 32)), "lm_head.weight", ("unexpected",)),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_error_is_found_and_named(exports: Path, tmp_path: Path, name: str) -> None:
    kind, corrupt, where, parts = CORRUPTIONS[name]
    folder = without_manifest(exports, kind, tmp_path / "broken")
    corrupt(folder)
    check = check_folder(folder)
    found = [str(finding) for finding in check.errors if finding.where == where]
    assert found, [str(finding) for finding in check.findings]
    check_message(" | ".join(found), where, *parts)
    with pytest.raises(InvalidExport, match=re.escape(where.split()[0])):
        check.raise_if_invalid()


@pytest.mark.parametrize("kind", KINDS)
def test_intact_exports_have_no_findings(exports: Path, tmp_path: Path, kind: str) -> None:
    """With and without a manifest, with facts from the export or from the target."""
    facts = TargetFacts.of_folder(exports / "target")
    for folder in (exports / kind, without_manifest(exports, kind, tmp_path / "copy")):
        for known in (None, facts):
            check = check_folder(folder, known)
            assert not check.findings
            assert not check.notes
            check.raise_if_invalid()


def test_mixed_dtypes_are_a_warning(exports: Path, tmp_path: Path) -> None:
    folder = without_manifest(exports, "eagle3", tmp_path / "odd")
    put("norm.weight", lambda weight: weight.float())(folder)
    check = check_folder(folder)
    assert not check.errors
    (warning,) = check.warnings
    assert (warning.where, warning.found) == ("dtype", "mixed: bfloat16, float32")


def test_third_party_drafts_are_compared_with_a_given_target(exports: Path, tmp_path: Path) -> None:
    """Checks that involve the target are skipped without it, and run with it."""
    folder = without_manifest(exports, "eagle3", tmp_path / "theirs")
    (folder / "sage_export.json").unlink()
    config(max_position_embeddings=2048, rope_theta=1e6)(folder)
    without = check_folder(folder)
    assert not without.errors
    check_message(without.notes[0], "--target DIR")
    with_target = check_folder(folder, TargetFacts.of_folder(exports / "target"))
    assert [finding.where for finding in with_target.errors] == ["rope_theta"]


def test_a_pickle_of_tensors_is_read_with_a_warning(exports: Path, tmp_path: Path) -> None:
    folder = without_manifest(exports, "eagle3", tmp_path / "bin")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    check = check_folder(folder)
    assert not check.errors
    assert [finding.where for finding in check.warnings] == ["pytorch_model.bin"]


def test_many_extra_tensors_are_summarized(exports: Path, tmp_path: Path) -> None:
    folder = without_manifest(exports, "eagle3", tmp_path / "many")
    tensors(lambda content: content.update({f"extra.{n}": torch.ones(1) for n in range(9)}))(folder)
    found = [str(finding) for finding in check_folder(folder).errors]
    assert len(found) == 5
    assert "5 more unexpected tensors" in found[-1]


ODD = (None, "x", -1, 10**9, True, ["x"], [0, 1, 2], {"x": 1}, {AUX: "x"}, {"rope_theta": "x", "mrope_section": 3})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "speculators"])
def test_any_config_value_yields_findings_not_exceptions(exports: Path, tmp_path: Path, kind: str) -> None:
    """Any value in any field yields findings, and an import that succeeds or raises one ValueError."""
    folder = without_manifest(exports, kind, tmp_path / "odd")
    facts = TargetFacts.of_folder(exports / "target")
    path = folder / "config.json"
    complete = json.loads(path.read_text())
    sections = [complete, *(part for part in complete.values() if isinstance(part, dict))]
    keys = [(section, key) for section in sections for key in section] + [
        (complete, "rope_parameters"),
        (complete, "eagle_config"),
    ]
    for section, key in keys:
        before = dict(section)
        for value in ODD:
            section[key] = value
            path.write_text(json.dumps(complete))
            check_folder(folder, facts)
            with suppress(ValueError):
                read_draft(folder, facts)
            section.clear()
            section.update(before)


def test_a_draft_that_was_not_exported(exports: Path) -> None:
    for name in ("three", "one"):
        check_message(str(check_folder(exports / name).errors[0]), "model_type", "sage_", "export it first")


def test_no_such_folder() -> None:
    with refused("/gone"):
        check_folder(Path("/gone"))


def test_facts_of_a_target(exports: Path, tmp_path: Path) -> None:
    facts = TargetFacts.of_folder(exports / "target")
    assert (facts.num_layers, facts.mrope_section, facts.max_position_embeddings) == (3, [2, 1, 1], 512)
    assert TargetFacts.from_dict(facts.to_dict()) == facts
    with refused("architecture"):
        TargetFacts.from_dict({"model_type": "qwen2_5_vl"})
    with refused("--target", "gone"):
        TargetFacts.of_folder(tmp_path / "gone")
    text("config.json", "{")(tmp_path)
    with refused("--target", "config.json"):
        TargetFacts.of_folder(tmp_path)
    text("config.json", '{"model_type": "gpt2"}')(tmp_path)
    with pytest.raises(ValueError, match="^--target .*'gpt2' is not a known family; known: .*qwen2_5_vl"):
        TargetFacts.of_folder(tmp_path)

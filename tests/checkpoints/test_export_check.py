"""The validator: every way that drafts are known to break in serving is found and named, and a whole export is not accused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.export_helpers import REDUCED, edit_json, export_draft, save_draft, save_target

from checkpoints.export import Flavour, TargetFacts, check_folder, read_eagle3
from checkpoints.export.validator.findings import BadExport

KINDS = ("eagle3", "speculators", "vllm", "sglang")
AUX = "eagle_aux_hidden_state_layer_ids"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whole export of each kind, and their target."""
    folder = tmp_path_factory.mktemp("exports")
    target = save_target(folder / "target")
    save_draft(folder / "three", target, vocabulary=REDUCED)
    save_draft(folder / "one", target, "eagle")
    for kind in ("eagle3", "speculators"):
        export_draft(folder / "three", folder / kind, kind)
    for flavour in Flavour:
        export_draft(folder / "one", folder / flavour, "eagle", flavour=flavour)
    return folder


def opened(exports: Path, kind: str, out: Path) -> Path:
    """A copy that can be tampered with: no manifest vouches for it any more."""
    shutil.copytree(exports / kind, out)
    (out / "manifest.json").unlink()
    return out


def config(**changes: Any) -> Damage:
    """Fields set to other values; `...` removes one."""

    def apply(content: dict[str, Any]) -> None:
        content.update(changes)
        for key in [key for key, value in changes.items() if value is ...]:
            content.pop(key)

    return lambda folder: edit_json(folder / "config.json", apply)


def nested(section: str, **changes: Any) -> Damage:
    """Fields of a section of config.json."""
    return lambda folder: edit_json(folder / "config.json", lambda content: content[section].update(changes))


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    """Tensors changed in the file."""

    def apply(folder: Path) -> None:
        content = load_file(folder / "model.safetensors")
        change(content)
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, folder / "model.safetensors")

    return apply


def put(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """One tensor replaced by a function of itself."""
    return tensors(lambda content: content.update({name: value(content[name])}))


def drop(name: str) -> Damage:
    return tensors(lambda content: content.pop(name))


def add(name: str, shape: tuple[int, ...] = (32,)) -> Damage:
    return tensors(lambda content: content.update({name: torch.ones(shape, dtype=torch.bfloat16)}))


def prefixed(content: dict[str, torch.Tensor]) -> None:
    for name in list(content):
        content[f"model.{name}"] = content.pop(name)


def text(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content) and None


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def sharded(*names: str) -> Damage:
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


# (kind of export, damage, where it must be found, a phrase of what is said about it)
DAMAGES: dict[str, tuple[str, Damage, str, str]] = {
    "no lm_head": ("eagle3", drop("lm_head.weight"), "lm_head.weight", "missing; .*acceptance 1.00, no error"),
    "no d2t": ("eagle3", drop("d2t"), "d2t", "missing; draft ids are taken for target ids"),
    "absolute d2t": ("eagle3", put("d2t", lambda d: d + torch.arange(len(d))), "d2t", "absolute target ids, not offsets"),
    "d2t out of range": ("eagle3", put("d2t", lambda d: d + 200), "d2t", "reaches ids 203 to 527, the vocabulary is 0 to 329"),
    "d2t twice the same": ("eagle3", put("d2t", repeated), "d2t", "sends 1 draft ids to words that others already mean"),
    "d2t in int32": ("eagle3", put("d2t", lambda d: d.int()), "d2t", "dtype int32, expected int64"),
    "t2d of another vocabulary": (
        "eagle3",
        put("t2d", lambda t: t.roll(1)),
        "t2d",
        "marks 109 ids, d2t reaches 109, 0 of them",
    ),
    "no fc": ("eagle3", drop("fc.weight"), "fc.weight", "missing; neither engine notices"),
    "fc of two levels": (
        "eagle3",
        put("fc.weight", lambda w: w[:, :64]),
        "fc.weight",
        r"shape \[32, 64\], expected \[32, 96\]",
    ),
    "NaN": ("eagle3", put("midlayer.mlp.up_proj.weight", nan), "midlayer.mlp.up_proj.weight", "1 values are not finite"),
    "ZeRO-3 saved zeros": ("eagle3", put("norm.weight", torch.zeros_like), "norm.weight", "all zero; .*ZeRO-3"),
    "ZeRO-3 saved nothing": ("eagle3", put("fc.weight", lambda w: w[:0, 0]), "fc.weight", r"shape \[0\]"),
    "an extra tensor": (
        "eagle3",
        add("embed_norm.weight"),
        "embed_norm.weight",
        "vLLM stops at an unknown name, SGLang skips it",
    ),
    "prefix model.": ("eagle3", tensors(prefixed), "model.d2t", "have the prefix 'model.'"),
    "integer weights": ("eagle3", put("fc.weight", lambda w: w.int()), "fc.weight", "dtype int32, expected float"),
    "short context": (
        "eagle3",
        config(max_position_embeddings=256),
        "max_position_embeddings",
        "256, the target's is 512; beyond 256",
    ),
    "no context": ("eagle3", config(max_position_embeddings=...), "max_position_embeddings", "LlamaConfig assumes 2048"),
    "other rope": ("eagle3", config(rope_theta=1e6), "rope_theta", "is 1e\\+06, the target's is 10000"),
    "plain rope": ("eagle3", config(rope_scaling=None), "rope_scaling", r"mrope_section None, the target's is \[2, 1, 1\]"),
    "scaled rope": (
        "eagle3",
        config(rope_scaling={"rope_type": "yarn", "mrope_section": [2, 1, 1]}),
        "rope_scaling",
        "'yarn'}, the target's is plain",
    ),
    "levels for SGLang off by one": (
        "eagle3",
        nested("eagle_config", **{AUX: [0, 1, 2]}),
        f"{AUX} and eagle_config.{AUX}",
        r"vLLM reads hidden_states\[0, 1, 2\], SGLang reads hidden_states\[1, 2, 3\]; .*acceptance near 1.00",
    ),
    "levels for vLLM alone": (
        "eagle3",
        config(eagle_config=...),
        f"{AUX} and eagle_config.{AUX}",
        r"SGLang reads hidden_states\[2, 1, 0\]",
    ),
    "two levels": ("eagle3", config(**{AUX: [0, 1]}), AUX, "fc takes exactly 3 levels"),
    "a level behind the last layer": ("eagle3", config(**{AUX: [0, 1, 3]}), AUX, "the target has 3 layers"),
    "other vocabulary": ("eagle3", config(vocab_size=331), "vocab_size", "331, the target's is 330"),
    "no draft_vocab_size": ("eagle3", config(draft_vocab_size=...), "draft_vocab_size", "SGLang takes the target's lm_head"),
    "tied": (
        "eagle3",
        config(tie_word_embeddings=True),
        "tie_word_embeddings",
        "True, expected false; SGLang uses the embedding",
    ),
    "the target's layer count": (
        "eagle3",
        config(num_hidden_layers=28),
        "num_hidden_layers",
        "28, expected 1; the engine builds layers",
    ),
    "null target_hidden_size": ("eagle3", config(target_hidden_size=None), "target_hidden_size", "null; SGLang .* stops"),
    "other target_hidden_size": ("eagle3", config(target_hidden_size=64), "target_hidden_size", "64, hidden_size is 32"),
    "norm_before_residual": ("eagle3", config(norm_before_residual=True), "norm_before_residual", "SGLang has no such switch"),
    "biases": ("eagle3", config(attention_bias=True), "attention_bias", "biases that have no weights here"),
    "another activation": ("eagle3", config(hidden_act="gelu"), "hidden_act", "'gelu', expected 'silu'"),
    "heads that do not divide": ("eagle3", config(num_key_value_heads=3), "num_key_value_heads", "3 does not divide 4 heads"),
    "a missing size": ("eagle3", config(intermediate_size=...), "intermediate_size", "None, expected a positive whole number"),
    "SafeAILab's class": (
        "eagle3",
        config(architectures=["LlamaForCausalLM"]),
        "architectures",
        "vLLM takes it, SGLang does not",
    ),
    "no draft's class": (
        "eagle3",
        config(architectures=["X"], draft_vocab_size=...),
        "architectures",
        "no engine can load it as a draft",
    ),
    "another model_type": ("eagle3", config(model_type="qwen2"), "model_type", "'qwen2', expected llama"),
    "code to run": ("eagle3", config(auto_map={"AutoModel": "x.Y"}), "auto_map", "names Python code to run"),
    "quantised": ("eagle3", config(quantization_config={"bits": 4}), "quantization_config", "present"),
    "config that is no JSON": ("eagle3", text("config.json", '{"architectures": ['), "config.json", "not JSON"),
    "config that is a list": ("eagle3", text("config.json", "[]"), "config.json", "holds a list"),
    "no config": ("eagle3", lambda folder: (folder / "config.json").unlink(), "config.json", "missing or unreadable"),
    "no description": ("eagle3", text("sage_export.json", "{}"), "sage_export.json", "target facts: need architecture"),
    "facts of another type": (
        "eagle3",
        lambda folder: edit_json(folder / "sage_export.json", lambda content: content["target"].update(num_layers="x")),
        "sage_export.json",
        "num_layers is 'x', expected int",
    ),
    "no weights": ("eagle3", lambda folder: (folder / "model.safetensors").unlink(), "weights", "no weights there"),
    "half a file": ("eagle3", truncated, "weights", "model.safetensors: damaged or not a safetensors file"),
    "a pickle that runs code": ("eagle3", pickled, "weights", "pytorch_model.bin: not a plain file of tensors"),
    "a shard outside": ("eagle3", sharded("../../etc/passwd"), "weights", "'../../etc/passwd', which leads out of the folder"),
    "a shard lost": ("eagle3", sharded("model-00001-of-00002.safetensors"), "weights", "00001-of-00002.safetensors: missing"),
    "residual not said": (
        "speculators",
        config(norm_before_residual=...),
        "norm_before_residual",
        "missing; vLLM assumes true",
    ),
    "a model_type on top": ("speculators", config(model_type="llama"), "model_type", "vLLM does not look for a speculator"),
    "no verifier": (
        "speculators",
        nested("speculators_config", verifier={}),
        "speculators_config.verifier",
        "which target to load",
    ),
    "no proposals": ("speculators", config(speculators_config=...), "speculators_config", "vLLM cannot find the verifier"),
    "unknown proposal": (
        "speculators",
        nested("speculators_config", default_proposal_method="tree"),
        "speculators_config.default_proposal_method",
        "'tree' is not one of",
    ),
    "another algorithm": (
        "speculators",
        config(speculators_model_type="dflash"),
        "speculators_model_type",
        "expected 'eagle3'",
    ),
    "no layer": ("speculators", config(transformer_layer_config=...), "transformer_layer_config", "missing"),
    "nested rope": (
        "speculators",
        nested("transformer_layer_config", rope_theta=5.0),
        "transformer_layer_config.rope_theta",
        "is 5",
    ),
    "fc_norm": ("speculators", config(fc_norm=True), "fc_norm", "needs a norm"),
    "no t2d": ("speculators", drop("t2d"), "t2d", "missing; speculators cannot"),
    "raw names": (
        "speculators",
        tensors(lambda c: c.update({"midlayer.hidden_norm.weight": c.pop("layers.0.hidden_norm.weight")})),
        "layers.0.hidden_norm.weight",
        "missing",
    ),
    "bias in vLLM's flavour": ("vllm", add("fc.bias"), "fc.bias", "unexpected tensor; the engine skips it silently"),
    "no bias in SGLang's flavour": ("sglang", drop("fc.bias"), "fc.bias", "missing; SGLang's fc has a bias"),
    "an input norm": ("vllm", add("layers.0.input_layernorm.weight"), "layers.0.input_layernorm.weight", "unexpected tensor"),
    "an own lm_head": ("sglang", add("lm_head.weight", (330, 32)), "lm_head.weight", "unexpected tensor"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(exports: Path, tmp_path: Path, name: str) -> None:
    kind, damage, where, phrase = DAMAGES[name]
    folder = opened(exports, kind, tmp_path / "broken")
    damage(folder)
    check = check_folder(folder)
    found = [str(finding) for finding in check.errors if finding.where == where]
    assert found, [str(finding) for finding in check.findings]
    with pytest.raises(AssertionError, match=phrase):
        raise AssertionError(" | ".join(found))
    with pytest.raises(BadExport, match=where.split()[0].replace(".", r"\.")):
        check.raise_if_bad()


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_export_is_not_accused(exports: Path, tmp_path: Path, kind: str) -> None:
    """Sealed or not, with its own facts or the target's."""
    facts = TargetFacts.of_folder(exports / "target")
    for folder in (exports / kind, opened(exports, kind, tmp_path / "copy")):
        for known in (None, facts):
            check = check_folder(folder, known)
            assert not check.findings
            assert not check.notes
            check.raise_if_bad()


def test_warnings_do_not_refuse(exports: Path, tmp_path: Path) -> None:
    folder = opened(exports, "eagle3", tmp_path / "odd")
    put("norm.weight", lambda weight: weight.float())(folder)
    check = check_folder(folder)
    assert not check.errors
    assert [str(finding) for finding in check.warnings] == ["dtype: mixed: bfloat16, float32; engines cast all of it to one"]


def test_strangers_are_checked_as_far_as_they_can_be(exports: Path, tmp_path: Path) -> None:
    """Without the target nothing is guessed; with it, what only the target knows is held against it."""
    folder = opened(exports, "eagle3", tmp_path / "theirs")
    (folder / "sage_export.json").unlink()
    config(max_position_embeddings=2048, rope_theta=1e6)(folder)
    blind = check_folder(folder)
    assert not blind.errors
    assert "give --target DIR" in blind.notes[0]
    seen = check_folder(folder, TargetFacts.of_folder(exports / "target"))
    assert [finding.where for finding in seen.errors] == ["rope_theta"]


def test_weights_in_a_plain_pickle_are_read_and_warned_about(exports: Path, tmp_path: Path) -> None:
    folder = opened(exports, "eagle3", tmp_path / "bin")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    check = check_folder(folder)
    assert not check.errors
    assert [finding.where for finding in check.warnings] == ["pytorch_model.bin"]


def test_more_than_a_handful_of_extra_tensors_is_summed_up(exports: Path, tmp_path: Path) -> None:
    folder = opened(exports, "eagle3", tmp_path / "many")
    tensors(lambda content: content.update({f"extra.{n}": torch.ones(1) for n in range(9)}))(folder)
    found = [str(finding) for finding in check_folder(folder).errors]
    assert len(found) == 5
    assert "5 more unexpected tensors" in found[-1]


ODD = (None, "x", -1, 10**9, True, ["x"], [0, 1, 2], {"x": 1}, {AUX: "x"}, {"rope_theta": "x", "mrope_section": 3})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "speculators"])
def test_no_config_however_odd_stops_the_check(exports: Path, tmp_path: Path, kind: str) -> None:
    """Any value in any field ends in findings, or in an import that works or says in one ValueError why not."""
    folder = opened(exports, kind, tmp_path / "odd")
    facts = TargetFacts.of_folder(exports / "target")
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    sections = [whole, *(part for part in whole.values() if isinstance(part, dict))]
    keys = [(section, key) for section in sections for key in section] + [(whole, "rope_parameters"), (whole, "eagle_config")]
    for section, key in keys:
        before = dict(section)
        for value in ODD:
            section[key] = value
            path.write_text(json.dumps(whole))
            check_folder(folder, facts)
            with suppress(ValueError):
                read_eagle3(folder, facts)
            section.clear()
            section.update(before)


def test_our_own_format_is_told_apart(exports: Path) -> None:
    for name in ("three", "one"):
        assert "as sage saves it; no engine knows it: export it first" in str(check_folder(exports / name).errors[0])


def test_no_such_folder() -> None:
    with pytest.raises(ValueError, match="/gone: no such folder"):
        check_folder(Path("/gone"))


def test_facts_of_a_target(exports: Path, tmp_path: Path) -> None:
    facts = TargetFacts.of_folder(exports / "target")
    assert (facts.num_layers, facts.mrope_section, facts.max_position_embeddings) == (3, [2, 1, 1], 512)
    assert TargetFacts.from_dict(facts.to_dict()) == facts
    with pytest.raises(ValueError, match="target facts: need architecture"):
        TargetFacts.from_dict({"model_type": "qwen2_5_vl"})
    with pytest.raises(ValueError, match=r"--target .*gone: no such folder"):
        TargetFacts.of_folder(tmp_path / "gone")
    text("config.json", "{")(tmp_path)
    with pytest.raises(ValueError, match=r"--target .*: cannot read its config\.json"):
        TargetFacts.of_folder(tmp_path)
    text("config.json", '{"model_type": "llama"}')(tmp_path)
    with pytest.raises(ValueError, match="model_type 'llama' is not a known family"):
        TargetFacts.of_folder(tmp_path)

"""The validator finds and names every known way in which a draft breaks in serving, and accepts intact exports."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.export_helpers import EXPORTS, Damage, add, change_config, change_tensors, copy_export, drop, put
from support.messages import check_message, refused

import sage
from checkpoints.export.importer import CheckResult, InvalidExport, check_folder, read_draft
from checkpoints.export.target import TargetFacts

AUX, BLOCK_AUX = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
BOTH_AUX = f"{AUX} and eagle_config.{AUX}"
TARGET_IDS, LAYER, PROPOSAL = "dflash_config.target_layer_ids", "transformer_layer_config", "speculators_config"
FC, UP = "fc.weight", "midlayer.mlp.up_proj.weight"


def layer(**changes: Any) -> Damage:
    return change_config(LAYER, **changes)


def native(**changes: Any) -> Damage:
    return change_config("dflash_config", **changes)


def proposal(**changes: Any) -> Damage:
    return change_config(PROPOSAL, **changes)


def implicitly_causal(folder: Path) -> None:
    layer(is_causal=...)(folder)
    change_config(sliding_window_non_causal=False)(folder)


def mask_file(size: int, token: int | None = None) -> Damage:
    """Adds an embedding of the mask token in a file of its own."""
    return lambda folder: torch.save({"embedding": torch.ones(size), "mask_token_id": token}, folder / "mask_embedding.pt")


def prefixed(content: dict[str, torch.Tensor]) -> None:
    for name in list(content):
        content[f"model.{name}"] = content.pop(name)


def text(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content)


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def shard(name: str) -> Damage:
    def apply(folder: Path) -> None:
        without("model.safetensors")(folder)
        text("model.safetensors.index.json", json.dumps({"weight_map": {name: name}}))(folder)

    return apply


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (exec, ("raise SystemExit('a pickle ran')",))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Evil()}, folder / "pytorch_model.bin")


def at(index: int, value: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Replaces one value of a tensor."""
    return lambda tensor: tensor.view(-1).index_fill(0, torch.tensor(index), value(tensor)).view_as(tensor)


YARN, AXES = {"rope_type": "yarn", "mrope_section": [2, 1, 1]}, {"rope_theta": 1e4, "mrope_section": [2, 1, 1]}
TWICE = {"target_layer_ids": [1, 2]}
FOUR_TOKENS = [{"proposal_type": "greedy", "speculative_tokens": 4}]
IMPORTED = "only engines are affected"
# In which export, what is damaged: where the finding must be, and what its text must contain; whether the draft can be imported
# in spite of it. One for each check.
DAMAGES: list[tuple[Any, ...]] = [
    # tensors
    ("eagle3", drop("lm_head.weight"), "lm_head.weight", ("missing", "acceptance 1.00, no error")),
    ("eagle3", drop("d2t"), "d2t", ("missing", "acceptance 1.00, no error")),
    ("eagle3", put("d2t", lambda d: d + torch.arange(len(d))), "d2t", ("absolute", "offsets")),
    ("eagle3", put("d2t", lambda d: d + 200), "d2t", ("203 to 527", "0 to 329")),
    ("eagle3", put("d2t", at(7, lambda d: int(d[6]) - 1)), "d2t", ("1 draft ids",)),
    ("eagle3", put("t2d", lambda t: t.roll(1)), "t2d", ("109 ids", "0 of them")),
    ("eagle3", put(FC, lambda w: w[:, :64]), FC, ("[32, 64]", "[32, 96]")),
    ("eagle3", put(UP, at(5, lambda _: torch.nan)), UP, ("1 values", "finite")),
    ("eagle3", put("norm.weight", torch.zeros_like), "norm.weight", ("zero", "ZeRO-3"), IMPORTED),
    ("eagle3", add("embed_norm.weight", 32), "embed_norm.weight", ("vLLM", "SGLang")),
    ("eagle3", change_tensors(prefixed), "model.d2t", ("'model.'",), IMPORTED),
    ("speculators", drop("t2d"), "t2d", ("missing", "speculators")),
    ("sglang", drop("fc.bias"), "fc.bias", ("missing", "SGLang")),
    ("vllm", add("layers.0.input_layernorm.weight", 32), "layers.0.input_layernorm.weight", ("unexpected",)),
    ("reduced", drop("lm_head.weight"), "lm_head.weight", ("missing", "acceptance 1.00"), IMPORTED),
    ("peagle", drop("mask_hidden"), "mask_hidden", ("missing", "parallel drafting")),
    ("peagle", layer(num_hidden_layers=1), "layers.1.mlp.up_proj.weight", ("unexpected",)),
    # files
    ("eagle3", text("config.json", '{"architectures": ['), "config.json", ("cannot read",)),
    ("eagle3", text("sage_export.json", '{"target": {"num_layers": "x"}}'), "sage_export.json", ("architecture",), IMPORTED),
    ("eagle3", without("model.safetensors"), "weights", ("pytorch_model.bin",)),
    ("eagle3", truncated, "weights", ("model.safetensors", "corrupt")),
    ("eagle3", pickled, "weights", ("pytorch_model.bin", "use safetensors")),
    ("eagle3", shard("../../etc/passwd"), "weights", ("'../../etc/passwd'", "outside")),
    ("eagle3", shard("model-00001-of-00002.safetensors"), "weights", ("00001-of-00002", "missing")),
    # the layer
    ("eagle3", change_config(architectures=["LlamaForCausalLM"]), "architectures", ("vLLM", "SGLang"), IMPORTED),
    ("eagle3", change_config(architectures=["X"], draft_vocab_size=...), "architectures", ("['X']", "LlamaForCausalLMEagle3")),
    ("eagle3", change_config(auto_map={"AutoModel": "x.Y"}), "auto_map", ("trust_remote_code",), IMPORTED),
    ("eagle3", change_config(quantization_config={"bits": 4}), "quantization_config", ("present",), IMPORTED),
    ("eagle3", change_config(num_key_value_heads=3), "num_key_value_heads", ("3", "4 heads")),
    ("eagle3", change_config(hidden_act="gelu"), "hidden_act", ("'gelu'", "'silu'"), IMPORTED),
    ("eagle3", change_config(rms_norm_eps=1), "rms_norm_eps", ("1", "1e-06")),
    ("eagle3", change_config(vocab_size=331), "vocab_size", ("331", "330")),
    ("eagle3", change_config(draft_vocab_size=...), "draft_vocab_size", ("None", "SGLang")),
    ("eagle3", change_config(num_hidden_layers=28), "num_hidden_layers", ("28", "1")),
    ("eagle3", change_config(max_position_embeddings=256), "max_position_embeddings", ("256", "512"), IMPORTED),
    ("eagle3", change_config(rope_theta=1e6), "rope_theta", ("1e+06", "10000"), IMPORTED),
    ("eagle3", change_config(rope_parameters={"rope_theta": 5e6}), "rope_theta", ("10000, and 5e+06 in rope_parameters",)),
    ("eagle3", change_config(rope_scaling=AXES | {"rope_theta": 5e6}), "rope_theta", ("5e+06, and 10000 in the config",)),
    ("eagle3", change_config(rope_scaling=YARN), "rope_scaling", ("'yarn'", "unscaled")),
    ("eagle3", change_config(tie_word_embeddings=True), "tie_word_embeddings", ("True", "false", "SGLang"), IMPORTED),
    ("speculators", change_config(fc_norm=False), "fc_norm.0.weight", ("unexpected tensor",)),
    ("eagle3", change_config(eagle_config={"norm_before_fc": True}), "input_norm.weight", ("missing",)),
    ("eagle3", change_config(norm_before_residual=True), "norm_before_residual", ("True", "SGLang"), IMPORTED),
    ("eagle3", change_config(target_hidden_size=None), "target_hidden_size", ("null", "SGLang"), IMPORTED),
    ("plain", layer(head_dim=...), f"{LAYER}.head_dim", ("None", "128"), IMPORTED),
    ("plain", layer(rope_parameters=AXES), f"{LAYER}.rope_parameters", ("[2, 1, 1]", "does not support M-RoPE"), IMPORTED),
    ("peagle", change_config(fc_norm=True), "fc_norm", ("does not read it for P-EAGLE",)),
    # the layout of the package speculators, and DFlash's own
    ("speculators", change_config(norm_before_residual=...), "norm_before_residual", ("missing", "true")),
    ("speculators", proposal(verifier={}), f"{PROPOSAL}.verifier", ("{}",), IMPORTED),
    ("speculators", proposal(default_proposal_method="tree"), f"{PROPOSAL}.default_proposal_method", ("'tree'",), IMPORTED),
    ("speculators", change_config(speculators_model_type="mtp"), "speculators_model_type", ("'eagle3'",), IMPORTED),
    ("speculators", change_config(transformer_layer_config=...), "transformer_layer_config", ("missing",)),
    ("native", change_config(dflash_config=None), "dflash_config", ("missing",)),
    # feature levels
    ("eagle3", change_config("eagle_config", **{AUX: [0, 1, 2]}), BOTH_AUX, ("vLLM reads hidden_states[0, 1, 2]", "[1, 2, 3]")),
    ("eagle3", change_config(eagle_config=...), BOTH_AUX, ("SGLang reads hidden_states[2, 1, 0]",), IMPORTED),
    ("eagle3", change_config(**{AUX: [0, 1, 1]}), AUX, ("increasing",)),
    ("eagle3", change_config(**{AUX: [0, 1, 3]}), AUX, ("3 layers", "0 to 2")),
    ("peagle_two", layer(num_aux_hidden_states=...), f"{LAYER}.num_aux_hidden_states", ("3", "2"), IMPORTED),
    ("plain", change_config(**{BLOCK_AUX: [0, 1]}), BLOCK_AUX, ("[0, 1]", "one too low", "output of layer k - 1"), IMPORTED),
    ("native", native(target_layer_ids=[1, 2]), TARGET_IDS, ("one too high", "[1, 2]", "[2, 3]")),
    ("plain", change_config(dflash_config=TWICE), BLOCK_AUX, ("[1, 2]", "[2, 3]", "convention")),
    ("plain", change_config(**{BLOCK_AUX: ...}), BLOCK_AUX, ("missing", "fc")),
    ("native", native(target_layer_ids=[1, 3]), TARGET_IDS, ("[2, 4]", "3 layers", "one too high")),
    # how slots attend
    ("plain", implicitly_causal, f"{LAYER}.is_causal", ("missing", "trains"), IMPORTED),
    ("native", change_config(is_causal=True), "is_causal", ("causal says false",), IMPORTED),
    ("plain", layer(layer_types=["full_attention"] * 2), f"{LAYER}.layer_types", ("expected 1",), IMPORTED),
    ("plain", layer(layer_types=["sliding_attention"]), f"{LAYER}.sliding_window", ("None",)),
    ("plain", layer(num_hidden_layers=65), f"{LAYER}.num_hidden_layers", ("65", "64")),
    # the block
    ("plain", change_config(block_size=...), "block_size", ("None", "block of 8")),
    ("plain", proposal(proposal_methods=FOUR_TOKENS), "speculative_tokens", ("4", "block of 4 drafts 3"), IMPORTED),
    ("plain", change_config(mask_token_id=330), "mask_token_id", ("330", "0 to 329")),
    ("plain", mask_file(32, 5), "mask_embedding.pt", ("token 5", "is 7")),
    ("dspark", mask_file(32), "mask_embedding.pt", ("ignores",)),
    ("plain", text("mask_embedding.pt", "x"), "mask_embedding.pt", ("tensors only",)),
    ("plain", change_config(sample_from_anchor=True), "sample_from_anchor", ("V2", "DSpark")),
    ("dspark", change_config(sample_from_anchor=...), "sample_from_anchor", ("None", "shift")),
    ("dspark", change_config(markov_head_type="gated"), "markov_head_type", ("'gated'", "vanilla")),
]


@pytest.mark.parametrize("row", range(len(DAMAGES)), ids=lambda row: f"{DAMAGES[row][0]}-{DAMAGES[row][2]}")
def test_every_error_is_found_and_named(exports: Path, tmp_path: Path, target: sage.Target, row: int) -> None:
    """And an import refuses what our head cannot do without either, and nothing else."""
    name, damage, where, parts, *imported = DAMAGES[row]
    folder = copy_export(exports / name, tmp_path / "broken")
    damage(folder)
    check = check_folder(folder)
    found = [str(finding) for finding in check.errors if finding.where == where]
    assert found, [str(finding) for finding in check.findings]
    check_message(" | ".join(found), where, *parts)
    with pytest.raises(InvalidExport, match=re.escape(where.split()[0])):
        check.raise_if_invalid()
    with nullcontext() if imported else pytest.raises(ValueError, match=str(folder)):
        read_draft(folder, TargetFacts.of_folder(str(target.name)))


@pytest.mark.parametrize("name", EXPORTS)
def test_intact_exports_have_no_errors(exports: Path, tmp_path: Path, target: sage.Target, name: str) -> None:
    """With and without a manifest, with facts from the export or from the target."""
    facts = TargetFacts.of_folder(str(target.name))
    for folder in (exports / name, copy_export(exports / name, tmp_path / "copy")):
        for known in (None, facts):
            check = check_folder(folder, known)
            assert [finding.where for finding in check.findings] == (["k_norm"] if name == "reduced" else [])
            assert not check.errors and not check.notes and check.format is not None
            assert (check.format.name, check.format.flavour) == (EXPORTS[name][3], EXPORTS[name][4].get("flavour"))
            check.raise_if_invalid()


def warnings(check: CheckResult) -> list[str]:
    assert not check.errors
    return [finding.where for finding in check.warnings]


def test_what_can_be_served_is_a_warning(exports: Path, tmp_path: Path) -> None:
    mixed, pickle, code = (copy_export(exports / name, tmp_path / name) for name in ("eagle3", "speculators", "native"))
    put("norm.weight", lambda weight: weight.float())(mixed)
    assert warnings(check_folder(mixed)) == ["dtype"]
    torch.save(load_file(pickle / "model.safetensors"), pickle / "pytorch_model.bin")
    (pickle / "model.safetensors").unlink()
    assert warnings(check_folder(pickle)) == ["pytorch_model.bin"]
    change_config(auto_map={"AutoModel": "dflash.X"})(code)
    assert warnings(check_folder(code)) == ["auto_map"]


def test_third_party_drafts_are_compared_with_a_given_target(exports: Path, tmp_path: Path, target: sage.Target) -> None:
    """Checks that involve the target are skipped without it, and run with it."""
    folder = copy_export(exports / "eagle3", tmp_path / "theirs")
    (folder / "sage_export.json").unlink()
    change_config(max_position_embeddings=2048, rope_theta=1e6)(folder)
    found = check_folder(folder)
    assert not found.errors
    check_message(found.notes[0], "--target DIR")
    with_target = check_folder(folder, TargetFacts.of_folder(str(target.name)))
    assert [finding.where for finding in with_target.errors] == ["rope_theta"]


@pytest.mark.parametrize(
    ("name", "where", "damage", "source"),
    [  # outputs of layers 1 and 9 are z-lab's default of two
        ("plain", BLOCK_AUX, change_config(**{BLOCK_AUX: [1, 9]}), "DFlash's own layout"),
        ("native", TARGET_IDS, native(target_layer_ids=[2, 10]), "speculators"),
        ("native", TARGET_IDS, native(target_layer_ids=[2, 6, 9]), "speculators"),
    ],
)
def test_defaults_of_the_other_convention_are_a_warning(exports, tmp_path, target, name, where, damage, source):
    """A third-party folder does not say what it was trained with; its levels may be those of the other convention."""
    folder = copy_export(exports / name, tmp_path / "theirs")
    (folder / "sage_export.json").unlink()
    damage(folder)
    facts = replace(TargetFacts.of_folder(str(target.name)), num_layers=12)
    (found,) = (str(finding) for finding in check_folder(folder, facts).findings if finding.where == where)
    check_message(found, source, "the other layout's convention")
    assert where not in [finding.where for finding in check_folder(folder).findings]


ODD = (None, "x", 10**9, [0, "x"], {AUX: "x", "rope_theta": "x", "mrope_section": 3})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_any_config_value_yields_findings_not_exceptions(exports: Path, tmp_path: Path, target: sage.Target, name: str) -> None:
    """Any value in any field yields findings, and an import that succeeds or raises one ValueError."""
    folder, facts = copy_export(exports / name, tmp_path / "odd"), TargetFacts.of_folder(str(target.name))
    path = folder / "config.json"
    complete = json.loads(path.read_text())
    sections = [complete, *(part for part in complete.values() if isinstance(part, dict))]
    keys = [(section, key) for section in sections for key in section]
    for section, key in [*keys, (complete, "rope_parameters"), (complete, "eagle_config")]:
        before = dict(section)
        for value in ODD:
            section[key] = value
            path.write_text(json.dumps(complete))
            check_folder(folder, facts)
            with suppress(ValueError):
                read_draft(folder, facts)
            section.clear()
            section.update(before)


def test_folders_without_an_export(exports: Path) -> None:
    check_message(str(check_folder(exports / "eagle3-draft").errors[0]), "model_type", "sage_", "export it first")
    with refused("/gone"):
        check_folder(Path("/gone"))


def test_facts_of_a_target(target: sage.Target, tmp_path: Path) -> None:
    facts = TargetFacts.of_folder(str(target.name))
    assert (facts.num_layers, facts.mrope_section, facts.max_position_embeddings) == (3, [2, 1, 1], 512)
    assert TargetFacts.from_dict(asdict(facts)) == facts
    with refused("architecture"):
        TargetFacts.from_dict({"model_type": "qwen2_5_vl"})
    with refused("num_layers", "'x'", "int"):
        TargetFacts.from_dict(asdict(facts) | {"num_layers": "x"})
    with refused("--target", "gone"):
        TargetFacts.of_folder(tmp_path / "gone")
    text("config.json", "{")(tmp_path)
    with refused("--target", "config.json"):
        TargetFacts.of_folder(tmp_path)
    text("config.json", '{"model_type": "gpt2"}')(tmp_path)
    with pytest.raises(ValueError, match="^--target .*'gpt2' is not a known family; known: .*qwen2_5_vl"):
        TargetFacts.of_folder(tmp_path)

"""Third-party drafts: every supported layout is imported with the same outputs; anything else is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.export_helpers import (
    LEVELS,
    MASK,
    REDUCED,
    Damage,
    add,
    change_config,
    change_tensors,
    copy_export,
    drop,
    export_draft,
    make_draft,
    outputs,
    put,
)
from support.messages import refused
from support.models import EAGLE_3_1

import sage
from checkpoints.export.format_checks import HEAD_NORMS
from checkpoints.export.formats.base import ImportOptions
from checkpoints.export.importer import check_folder, convert, read_draft
from checkpoints.export.target import TargetFacts

AUX = "eagle_aux_hidden_state_layer_ids"
Folder = Callable[..., Path]


@pytest.fixture
def theirs(targets: dict[str, sage.Target], tmp_path: Path) -> Folder:
    """Writes a third-party folder: our trained tensors in float32 under the names of `eagle3`, and a third-party config."""

    def write(
        family: str = "qwen2_5_vl", rename: Callable[[str], str] = str, extra: dict[str, Any] | None = None, **config: Any
    ) -> Path:
        target = targets[family]
        draft = make_draft(target, vocabulary=REDUCED, **{key: True for key in EAGLE_3_1 if config.get(key)})
        folder = tmp_path / "theirs"
        folder.mkdir()
        tensors = {rename(name): tensor for name, tensor in draft.state_dict().items()}
        save_file({**tensors, **(extra or {})}, folder / "model.safetensors")
        content = {**BASE, **({"rope_scaling": SCALING} if family == "qwen2_5_vl" else {}), **config}
        (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))
        return folder

    return write


BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 330,
    "draft_vocab_size": len(REDUCED),
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eagle_config": {AUX: [k - 1 for k in LEVELS]},
}
SCALING = {"type": "mrope", "mrope_section": [2, 1, 1]}


def imported(folder: Path, target: sage.Target, out: Path, **options: Any) -> Any:
    return sage.load_draft(convert(folder, target.name, out, ImportOptions(**options)), target)


def expected(target: sage.Target) -> torch.Tensor:
    """The outputs of the trained draft."""
    return outputs(make_draft(target, vocabulary=REDUCED, rms_norm_eps=1e-6))


class TestLayouts:
    def test_specforge(self, targets: Any, theirs: Folder, tmp_path: Path) -> None:
        """The target's embedding inside, a training length as context, SGLang's level ids, M-RoPE without a rope_type."""
        target = targets["qwen2_5_vl"]
        folder = theirs(
            extra={"embed_tokens.weight": target.embed_tokens.weight.detach()}, max_position_embeddings=2048, use_cache=True
        )
        draft = imported(folder, target, tmp_path / "out")
        assert torch.equal(outputs(draft), expected(target))
        assert draft.levels == tuple(LEVELS)
        assert torch.equal(draft.token_map, REDUCED)
        assert draft.config.max_position_embeddings == 512

    @pytest.mark.parametrize("norms", [EAGLE_3_1, {"norm_before_fc": True}])
    def test_norms_of_eagle_3_1(self, targets: Any, theirs: Folder, tmp_path: Path, norms: dict[str, bool]) -> None:
        """As SpecForge and speculators train them; exported again for vLLM and SGLang as they were."""
        target, size = targets["qwen2_5_vl"], len(LEVELS) * 32
        joint = {"input_norm.weight": torch.linspace(1, 2, size)} if "norm_before_fc" in norms else {}
        draft = imported(folder := theirs(extra=joint, **norms), target, tmp_path / "out")
        trained: Any = make_draft(target, vocabulary=REDUCED, rms_norm_eps=1e-6, **({} if joint else norms))
        if joint:
            trained.input_norm = torch.nn.RMSNorm(size, 1e-6)
            trained.input_norm.load_state_dict({"weight": joint["input_norm.weight"]})
        assert torch.equal(outputs(draft), outputs(trained))
        again = export_draft(tmp_path / "out", tmp_path / "again", dtype=torch.float32).folder
        ours, own = (load_file(path / "model.safetensors") for path in (again, folder))
        assert {*ours} == {*own} and all(torch.equal(ours[name], own[name]) for name in own)
        assert {key for key in HEAD_NORMS if json.loads((again / "config.json").read_text()).get(key)} == {*norms}

    def test_angelslim(self, targets: Any, theirs: Folder, tmp_path: Path) -> None:
        """The target's layer count, tied embeddings, `default` rope with sections, inverse frequencies saved along."""
        folder = theirs(
            extra={"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)},
            architectures=["Eagle3LlamaForCausalLM"],
            num_hidden_layers=3,
            tie_word_embeddings=True,
            rope_scaling={"type": "default", "rope_type": "default", "mrope_section": [2, 1, 1]},
            modal_type="VLM",
        )
        draft = imported(folder, targets["qwen2_5_vl"], tmp_path / "out")
        assert torch.equal(outputs(draft), expected(targets["qwen2_5_vl"]))

    def test_safeailab(self, targets: Any, theirs: Folder, tmp_path: Path) -> None:
        """A pickle of plain tensors, the class name of the complete Llama, no head_dim, no level ids, no t2d."""
        folder = theirs(
            "llava_onevision", architectures=["LlamaForCausalLM"], head_dim=..., eagle_config=..., rope_scaling=None
        )
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("t2d")
        torch.save(tensors, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        draft = imported(folder, targets["llava_onevision"], tmp_path / "out", levels=(0, 1, 2))
        assert torch.equal(outputs(draft), expected(targets["llava_onevision"]))
        assert draft.t2d.nonzero()[:, 0].tolist() == REDUCED.tolist()

    @pytest.mark.parametrize("is_before", [False, True])
    def test_speculators(self, targets: Any, theirs: Folder, tmp_path: Path, is_before: bool) -> None:
        """Nested config, layers.0, tensors of the verifier, and the residual after or before the norm."""
        layer = {key: BASE[key] for key in BASE if key not in ("architectures", "draft_vocab_size", "eagle_config")}
        folder = theirs(
            rename=lambda name: name.replace("midlayer.", "layers.0."),
            extra={"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": torch.ones(109, 32)},
            **dict.fromkeys(layer, ...),
            architectures=["Eagle3DraftModel"],
            speculators_model_type="eagle3",
            norm_before_residual=is_before,
            eagle_config=...,
            transformer_layer_config={**layer, "rope_scaling": SCALING},
            **{AUX: LEVELS},
        )
        draft = imported(folder, targets["qwen2_5_vl"], tmp_path / "out")
        assert torch.equal(outputs(draft), expected(targets["qwen2_5_vl"])) == (not is_before)
        assert draft.config.norm_before_residual == is_before

    def test_shards_and_prefixes(self, targets: Any, theirs: Folder, tmp_path: Path) -> None:
        folder = theirs(rename=lambda name: f"model.{name}")
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        places = {name: f"model-{n % 2}.safetensors" for n, name in enumerate(tensors)}
        for shard in set(places.values()):
            save_file({name: tensors[name] for name, place in places.items() if place == shard}, folder / shard)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        draft = imported(folder, targets["qwen2_5_vl"], tmp_path / "out")
        assert torch.equal(outputs(draft), expected(targets["qwen2_5_vl"]))

    def test_load_draft(self, targets: Any, theirs: Folder, tmp_path: Path) -> None:
        """Every command loads third-party drafts and exports as it loads ours."""
        target = targets["qwen2_5_vl"]
        draft = sage.load_draft(theirs(), target)
        assert torch.equal(outputs(draft), expected(target))
        make_draft(target).save_pretrained(tmp_path / "ours")
        assert torch.equal(outputs(sage.load_draft(tmp_path / "ours", target)), outputs(make_draft(target)))
        with refused("neither a run", "config.json"):
            sage.load_draft(tmp_path, target)
        with refused("mrope_section"):
            sage.load_draft(tmp_path / "theirs", targets["llava_onevision"])

    def test_zlab(self, exports: Path, tmp_path: Path, target: sage.Target) -> None:
        """Code to run, rope_theta at the top, no key for causality or attention."""
        folder = copy_export(exports / "native", tmp_path / "zlab")
        change_config(auto_map={"AutoModel": "dflash.X"}, is_causal=..., layer_types=...)(folder)
        change_config(rope_parameters=..., rope_theta=1e4)(folder)
        change_config("dflash_config", causal=...)(folder)
        assert sage.load_draft(folder, target).config.causal is False

    def test_tables_of_the_target(self, exports: Path, tmp_path: Path, target: sage.Target) -> None:
        """Speculators up to 0.7 has its embedding and lm_head; a P-EAGLE draft without one takes the row of its mask."""
        old, bare = copy_export(exports / "plain", tmp_path / "old"), copy_export(exports / "peagle", tmp_path / "bare")
        tables = {"embed_tokens.weight": target.embed_tokens.weight, "lm_head.weight": target.lm_head.weight}
        change_tensors(lambda t: t.update({name: table.detach() for name, table in tables.items()}))(old)
        sage.load_draft(old, target)
        drop("embed_tokens.weight")(bare)
        for folder in (old, bare):
            assert not check_folder(folder).errors
        draft = read_draft(bare, TargetFacts.of_folder(str(target.name)))
        assert torch.equal(draft.mask_embedding[0, 0], target.embed_tokens.weight[MASK])

    def test_image_inputs_come_from_the_export_or_the_options(self, targets: Any, theirs: Folder, tmp_path: Path) -> None:
        target = targets["qwen2_5_vl"]
        make_draft(target, image_inputs="token").save_pretrained(tmp_path / "draft")
        export_draft(tmp_path / "draft", tmp_path / "export")
        assert imported(tmp_path / "export", target, tmp_path / "a").config.image_inputs == "token"
        assert imported(tmp_path / "export", target, tmp_path / "b", image_inputs="embed").config.image_inputs == "embed"
        assert imported(theirs(), target, tmp_path / "c").config.image_inputs == "embed"


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 64}
BLOCK_AUX = "aux_hidden_state_layer_ids"
LAYER = "transformer_layer_config"


def narrow_confidence(folder: Path) -> None:
    """A confidence head that does not read the markov head."""
    change_config(confidence_head_with_markov=False)(folder)
    put("confidence_head.proj.weight", lambda w: w[:, :32])(folder)


# Remedies, and what engines have and our head does not; other refusals are those of test_export_check.py.
REFUSED: list[tuple[str, Damage, tuple[str, ...]]] = [
    ("eagle3", change_config(norm_before_fc=True), ("input_norm.weight: missing",)),
    ("eagle3", change_config(num_hidden_layers=2), ("num_hidden_layers: 2", "one layer")),
    ("eagle3", change_config(hidden_size=64), ("hidden_size: 64", "is 32")),
    ("eagle3", change_config(intermediate_size=64), ("midlayer.mlp.", "_proj.weight: shape", "config.json")),
    ("eagle3", change_config(rope_theta=float("inf")), ("rope_theta: inf",)),
    ("eagle3", change_config(rope_scaling=None), ("rope_scaling: mrope_section None", "--use-target-rope")),
    ("eagle3", change_config(**{AUX: [1, 2, 3]}), ("vLLM reads hidden_states[1, 2, 3]", "--levels")),
    ("eagle3", add("midlayer.self_attn.q_norm.weight", 8), ("q_norm.weight", "not part of our EAGLE-3 head")),
    ("eagle3", add("embed_tokens.weight", 330, 32), ("embed_tokens.weight", "the target's")),
    ("plain", change_config(sample_from_anchor=True), ("sample_from_anchor", "not false")),
    ("plain", change_config(LAYER, **WINDOW), ("layer_types", "sliding")),
    ("plain", change_config(LAYER, attention_bias=True), ("attention_bias",)),
    ("plain", change_config(LAYER, rope_parameters=LINEAR), ("'linear'", "--use-target-rope")),
    ("plain", change_config(**{BLOCK_AUX: [1, 3]}), (BLOCK_AUX, "final norm", "--levels")),
    ("dspark", narrow_confidence, ("confidence_head_with_markov",)),
    ("reduced", put("lm_head.weight", lambda w: w.roll(1, 0)), ("lm_head.weight: differs",)),
    ("peagle", change_config(norm_before_fc=True), ("norm_before_fc", "our head")),
    ("peagle", change_config(speculators_config={}), ("speculative_tokens", "None")),
    ("peagle", put("embed_tokens.weight", lambda w: w + 1), ("embed_tokens.weight: differs", "the target's")),
]


@pytest.mark.parametrize("row", range(len(REFUSED)), ids=lambda row: f"{REFUSED[row][0]}-{REFUSED[row][2][0]}")
def test_what_our_head_does_not_have_is_refused_by_name(exports: Path, target: sage.Target, tmp_path: Path, row: int) -> None:
    name, damage, parts = REFUSED[row]
    folder = copy_export(exports / name, tmp_path / "theirs")
    damage(folder)
    with refused(*parts):
        convert(folder, str(target.name), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class TestOptions:
    def test_options_resolve_what_a_folder_leaves_open(self, exports: Path, target: sage.Target, tmp_path: Path) -> None:
        facts = TargetFacts.of_folder(str(target.name))
        folder = copy_export(exports / "eagle3", tmp_path / "theirs")
        change_config(rope_scaling=None, **{AUX: [1, 2, 3]})(folder)
        draft = read_draft(folder, facts, ImportOptions(levels=(0, 1, 2), use_target_rope=True))
        assert draft.config.mrope_section == [2, 1, 1] and draft.levels == (0, 1, 2)
        with refused("rope_scaling", "--use-target-rope"):
            read_draft(folder, facts, ImportOptions(levels=(0, 1, 2)))
        block = copy_export(exports / "native", tmp_path / "block")
        change_config("dflash_config", target_layer_ids=[1, 2])(block)
        change_config(rope_parameters=LINEAR)(block)
        draft = read_draft(block, facts, ImportOptions(levels=(1, 2), use_target_rope=True))
        assert draft.levels == (1, 2) and (draft.config.rope_theta, draft.config.scaled_rope) == (10000.0, None)

    @pytest.mark.parametrize(("name", "levels"), [("eagle3", (0, 1)), ("plain", (0, 1, 2)), ("peagle", (1, 2))])
    def test_levels_of_another_number_are_refused(self, exports, target, name, levels):
        with refused("--levels", str(list(levels)), "levels"):
            read_draft(exports / name, TargetFacts.of_folder(str(target.name)), ImportOptions(levels=levels))

    def test_a_block_draft_keeps_its_own_theta(self, exports: Path, target: sage.Target, tmp_path: Path) -> None:
        folder = copy_export(exports / "plain", tmp_path / "theirs")
        change_config(LAYER, rope_parameters={"rope_theta": 5.0})(folder)
        facts = TargetFacts.of_folder(str(target.name))
        assert read_draft(folder, facts).config.rope_theta == 5.0
        assert read_draft(folder, facts, ImportOptions(use_target_rope=True)).config.rope_theta == 10000.0

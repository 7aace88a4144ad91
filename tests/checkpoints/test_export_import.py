"""Third-party drafts: every supported layout is imported with the same outputs; anything else is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.export_helpers import LEVELS, REDUCED, edit_json, export_draft, make_draft, outputs
from support.messages import refused

import sage
from checkpoints.export.configs import TargetFacts
from checkpoints.export.formats.findings import ImportOptions
from checkpoints.export.importer import convert, read_draft

AUX = "eagle_aux_hidden_state_layer_ids"
Folder = Callable[..., Path]


@pytest.fixture
def theirs(targets: dict[str, sage.Target], tmp_path: Path) -> Folder:
    """Writes a third-party folder: our trained tensors in float32 under the names of `eagle3`, and a third-party config."""

    def write(
        family: str = "qwen2_5_vl", rename: Callable[[str], str] = str, extra: dict[str, Any] | None = None, **config: Any
    ) -> Path:
        target = targets[family]
        draft = make_draft(target, vocabulary=REDUCED)
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

    def test_full_vocabulary_without_maps(self, targets: Any, tmp_path: Path) -> None:
        target = targets["qwen2_5_vl"]
        draft = make_draft(target)
        draft.save_pretrained(tmp_path / "draft")
        export_draft(tmp_path / "draft", tmp_path / "theirs", dtype=torch.float32)
        back = imported(tmp_path / "theirs", target, tmp_path / "out")
        assert back.token_map is None
        assert torch.equal(outputs(back), outputs(draft))

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

    def test_image_inputs_come_from_the_export_or_the_options(self, targets: Any, theirs: Folder, tmp_path: Path) -> None:
        target = targets["qwen2_5_vl"]
        make_draft(target, image_inputs="token").save_pretrained(tmp_path / "draft")
        export_draft(tmp_path / "draft", tmp_path / "export")
        assert imported(tmp_path / "export", target, tmp_path / "a").config.image_inputs == "token"
        assert imported(tmp_path / "export", target, tmp_path / "b", image_inputs="embed").config.image_inputs == "embed"
        assert imported(theirs(), target, tmp_path / "c").config.image_inputs == "embed"


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "parts"),
        [
            ({"norm_before_fc": True}, ("norm_before_fc: True",)),
            ({"attention_bias": True}, ("attention_bias: True",)),
            ({"num_hidden_layers": 2}, ("num_hidden_layers: 2", "one layer")),
            ({"vocab_size": 331}, ("vocab_size: 331", "is 330")),
            ({"hidden_size": 64}, ("hidden_size: 64", "is 32")),
            ({"intermediate_size": ...}, ("intermediate_size: None",)),
            ({"intermediate_size": 64}, ("midlayer.mlp.", "_proj.weight: shape", "config.json")),
            ({"rope_scaling": None}, ("rope_scaling: mrope_section None", "--use-target-rope")),
            (
                {"rope_scaling": {"rope_type": "yarn", "mrope_section": [2, 1, 1]}},
                ("rope_scaling: ", "'yarn'", "--use-target-rope"),
            ),
            ({AUX: [1, 2, 3]}, ("vLLM reads hidden_states[1, 2, 3]", "--levels")),
            ({"eagle_config": {AUX: [0, 1]}}, ("SGLang reads hidden_states[1, 2]", "--levels")),
            ({"eagle_config": {AUX: [0, 1, 9]}}, ("SGLang reads hidden_states[1, 2, 10]", "0 to 2", "--levels")),
            ({"architectures": ["Qwen2ForCausalLM"], "draft_vocab_size": ...}, ("Qwen2ForCausalLM", "EAGLE-3")),
        ],
    )
    def test_configs_that_cannot_be_expressed(
        self, targets: Any, theirs: Folder, tmp_path: Path, change: dict[str, Any], parts: tuple[str, ...]
    ) -> None:
        with refused(*parts):
            convert(theirs(**change), targets["qwen2_5_vl"].name, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("change", "parts"),
        [
            (lambda t: t.pop("lm_head.weight"), ("lm_head.weight: missing",)),
            (lambda t: t.pop("d2t"), ("d2t: missing",)),
            (lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}), ("q_norm.weight",)),
            (lambda t: t.update({"d2t": REDUCED.clone()}), ("d2t", "absolute")),
            (lambda t: t.update({"t2d": t["t2d"].roll(1)}), ("t2d", "109 ids")),
            (lambda t: t.update({"embed_tokens.weight": torch.ones(330, 32)}), ("embed_tokens.weight", "the target's")),
        ],
    )
    def test_tensors_that_are_missing_wrong_or_unknown(
        self,
        targets: Any,
        theirs: Folder,
        tmp_path: Path,
        change: Callable[[dict[str, torch.Tensor]], Any],
        parts: tuple[str, ...],
    ) -> None:
        folder = theirs()
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        with refused(*parts):
            convert(folder, targets["qwen2_5_vl"].name, tmp_path / "out")

    def test_speculators_without_a_residual_convention(self, targets: Any, theirs: Folder, tmp_path: Path) -> None:
        folder = theirs(architectures=["Eagle3DraftModel"], speculators_model_type="eagle3")
        with refused("norm_before_residual: missing", "add the value"):
            convert(folder, targets["qwen2_5_vl"].name, tmp_path / "out")

    def test_a_draft_of_another_target_is_refused_when_loaded(self, targets: Any, theirs: Folder, tmp_path: Path) -> None:
        out = convert(theirs(), targets["qwen2_5_vl"].name, tmp_path / "out")
        with refused("qwen2_5_vl", "llava_onevision"):
            sage.load_draft(out, targets["llava_onevision"])

    def test_options_resolve_what_a_folder_leaves_open(self, targets: Any, theirs: Folder) -> None:
        facts = TargetFacts.of_folder(targets["qwen2_5_vl"].name)
        folder = theirs(rope_scaling=None, **{AUX: [1, 2, 3]})
        draft = read_draft(folder, facts, ImportOptions(levels=(0, 1, 2), use_target_rope=True))
        assert draft.config.mrope_section == [2, 1, 1]
        assert draft.levels == (0, 1, 2)
        edit_json(folder / "config.json", lambda config: config.update(rope_theta=5.0))
        with refused("rope_scaling", "--use-target-rope"):
            read_draft(folder, facts, ImportOptions(levels=(0, 1, 2)))

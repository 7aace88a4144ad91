"""Drafts made elsewhere: each layout becomes ours with the same outputs; what we cannot express is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.export_helpers import LEVELS, REDUCED, edit_json, export_draft, make_draft, save_target

import sage
from checkpoints.export import Reading, TargetFacts, convert, load_any, read_eagle3
from checkpoints.export.reload import outputs

AUX = "eagle_aux_hidden_state_layer_ids"
Folder = Callable[..., Path]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, sage.Target]:
    return {f: save_target(tmp_path_factory.mktemp(f) / "target", f) for f in ("qwen2_5_vl", "llava_onevision")}


@pytest.fixture
def theirs(targets: dict[str, sage.Target], tmp_path: Path) -> Folder:
    """Writes a folder as a stranger would: our trained tensors in float32 under the names of `eagle3`, and their config."""

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


def imported(folder: Path, target: sage.Target, out: Path, **reading: Any) -> Any:
    return sage.load_draft(convert(folder, target.name, out, Reading(**reading)), target)


def expected(target: sage.Target) -> torch.Tensor:
    """What the trained draft computes."""
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
        """A pickle of plain tensors, the class name of the whole Llama, no head_dim, no level ids, no t2d."""
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

    def test_whole_vocabulary_without_maps(self, targets: Any, tmp_path: Path) -> None:
        target = targets["qwen2_5_vl"]
        draft = make_draft(target)
        draft.save_pretrained(tmp_path / "draft")
        export_draft(tmp_path / "draft", tmp_path / "theirs", dtype=torch.float32)
        back = imported(tmp_path / "theirs", target, tmp_path / "out")
        assert back.token_map is None
        assert torch.equal(outputs(back), outputs(draft))

    def test_without_writing_anything(self, targets: Any, theirs: Folder, tmp_path: Path) -> None:
        """What sage-validate does with a foreign folder; ours are loaded as ever."""
        target = targets["qwen2_5_vl"]
        draft = load_any(theirs(), target)
        assert torch.equal(outputs(draft), expected(target))
        make_draft(target).save_pretrained(tmp_path / "ours")
        assert torch.equal(outputs(load_any(tmp_path / "ours", target)), outputs(make_draft(target)))
        with pytest.raises(ValueError, match="no draft there"):
            load_any(tmp_path, target)
        with pytest.raises(ValueError, match="vocab_size|mrope_section"):
            load_any(tmp_path / "theirs", targets["llava_onevision"])

    def test_what_was_shown_at_pictures_is_remembered_or_said(self, targets: Any, theirs: Folder, tmp_path: Path) -> None:
        target = targets["qwen2_5_vl"]
        make_draft(target, image_inputs="token").save_pretrained(tmp_path / "draft")
        export_draft(tmp_path / "draft", tmp_path / "export")
        assert imported(tmp_path / "export", target, tmp_path / "a").config.image_inputs == "token"
        assert imported(tmp_path / "export", target, tmp_path / "b", image_inputs="embed").config.image_inputs == "embed"
        assert imported(theirs(), target, tmp_path / "c").config.image_inputs == "embed"


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"norm_before_fc": True}, "norm_before_fc is True: our EAGLE-3 head has no such part"),
            ({"attention_bias": True}, "attention_bias is True"),
            ({"num_hidden_layers": 2}, "num_hidden_layers is 2: our head has one layer"),
            ({"vocab_size": 331}, "vocab_size is 331, that of the target .* is 330"),
            ({"hidden_size": 64}, "hidden_size is 64, that of the target .* is 32"),
            ({"intermediate_size": ...}, "layer sizes are missing"),
            ({"intermediate_size": 64}, r"midlayer\.mlp\.\w+_proj\.weight has shape .*, its config means"),
            ({"rope_scaling": None}, r"rope_scaling is plain with mrope_section None.*--use-target-rope"),
            ({"rope_scaling": {"rope_type": "yarn", "mrope_section": [2, 1, 1]}}, "rope_scaling is .*'yarn'"),
            (
                {AUX: [1, 2, 3]},
                r"means hidden_states\[1, 2, 3\] to vLLM and, in eagle_config, hidden_states\[0, 1, 2\].*--levels",
            ),
            ({"eagle_config": {AUX: [0, 1]}}, r"feature levels \[1, 2\]: need three"),
            ({"eagle_config": {AUX: [0, 1, 9]}}, r"feature levels \[1, 2, 10\]: need three rising ones of 0\.\.2"),
            ({"architectures": ["Qwen2ForCausalLM"], "draft_vocab_size": ...}, "is not an EAGLE-3 draft"),
        ],
    )
    def test_a_config_that_means_something_else(
        self, targets: Any, theirs: Folder, tmp_path: Path, change: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            convert(theirs(**change), targets["qwen2_5_vl"].name, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.pop("lm_head.weight"), r"lm_head\.weight: missing"),
            (lambda t: t.pop("d2t"), r"d2t: missing"),
            (
                lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}),
                r"q_norm\.weight: our EAGLE-3 head has no place",
            ),
            (lambda t: t.update({"d2t": REDUCED.clone()}), "d2t: holds absolute target ids"),
            (lambda t: t.update({"t2d": t["t2d"].roll(1)}), "t2d: marks 109 ids"),
            (
                lambda t: t.update({"embed_tokens.weight": torch.ones(330, 32)}),
                r"embed_tokens\.weight differs from the target's",
            ),
        ],
    )
    def test_tensors_that_are_not_what_was_trained(
        self, targets: Any, theirs: Folder, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
    ) -> None:
        folder = theirs()
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            convert(folder, targets["qwen2_5_vl"].name, tmp_path / "out")

    def test_speculators_without_a_residual_convention(self, targets: Any, theirs: Folder, tmp_path: Path) -> None:
        folder = theirs(architectures=["Eagle3DraftModel"], speculators_model_type="eagle3")
        with pytest.raises(ValueError, match="norm_before_residual is missing: engines assume true, others false"):
            convert(folder, targets["qwen2_5_vl"].name, tmp_path / "out")

    def test_a_draft_of_another_target_is_refused_when_loaded(self, targets: Any, theirs: Folder, tmp_path: Path) -> None:
        out = convert(theirs(), targets["qwen2_5_vl"].name, tmp_path / "out")
        with pytest.raises(ValueError, match="was made for qwen2_5_vl"):
            sage.load_draft(out, targets["llava_onevision"])

    def test_the_users_word_settles_what_a_folder_leaves_open(self, targets: Any, theirs: Folder) -> None:
        facts = TargetFacts.of_folder(targets["qwen2_5_vl"].name)
        folder = theirs(rope_scaling=None, **{AUX: [1, 2, 3]})
        draft = read_eagle3(folder, facts, Reading(levels=(0, 1, 2), use_target_rope=True))
        assert draft.config.mrope_section == [2, 1, 1]
        assert draft.levels == (0, 1, 2)
        edit_json(folder / "config.json", lambda config: config.update(rope_theta=5.0))
        with pytest.raises(ValueError, match="rope_scaling"):
            read_eagle3(folder, facts, Reading(levels=(0, 1, 2)))

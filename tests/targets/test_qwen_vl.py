"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and its mixture of experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.data_helpers import assistant, make_image, own_answers
from support.family_passes import Exported, paths, tree
from support.family_suite import QWEN_TEMPLATE, QWEN_TOKENS, FamilySuite, qwen_images, text
from support.models import QWEN_IDS, random_draft
from support.processors import user
from transformers import Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3VLConfig, Qwen3VLMoeConfig

import sage
from sage.drafts.eagle import levels_for
from sage.drafts.layer import Rope


class TestQwen2VL(FamilySuite):
    template, tokens, hf_processor = QWEN_TEMPLATE, QWEN_TOKENS, "Qwen2VLProcessor"

    def config(self) -> Qwen2VLConfig:
        vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4}
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        return Qwen2VLConfig(text_config=text(rope_parameters=rope), vision_config=vision, **QWEN_IDS)

    def image_processor(self) -> Any:
        return qwen_images()


class TestQwen2_5_VL(FamilySuite):
    template, tokens, hf_processor = QWEN_TEMPLATE, QWEN_TOKENS, "Qwen2_5_VLProcessor"

    def config(self) -> Qwen2_5_VLConfig:
        vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
        vision |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        return Qwen2_5_VLConfig(text_config=text(rope_parameters=rope), vision_config=vision, **QWEN_IDS)

    def image_processor(self) -> Any:
        return qwen_images()

    def test_own_answers_to_questions_about_images_are_all_own(self, target: sage.Target, tmp_path: Path) -> None:
        chats, answer = [], assistant("x")
        for i, size in enumerate((16, 24)):
            make_image(size, "blue").save(tmp_path / f"{i}.png")
            chats.append([*user({"type": "image", "image": f"{i}.png"}, "What?"), answer, *user("And?"), answer])
        share, _ = own_answers(target, chats, tmp_path)
        assert share.share == 1.0 and share.num_tokens > 12


ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
VISION = {"depth": 4, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
VISION |= {"num_position_embeddings": 16, "deepstack_visual_indexes": (0, 1, 2)}


class TestQwen3VL(FamilySuite):
    template, tokens, hf_processor = QWEN_TEMPLATE, QWEN_TOKENS, "Qwen3VLProcessor"

    def config(self) -> Any:
        return Qwen3VLConfig(text_config=text(head_dim=8, rope_parameters=ROPE), vision_config=VISION, **QWEN_IDS)

    def image_processor(self) -> Any:
        return qwen_images()

    def hugging_face_settings(self, target: sage.Target) -> dict[str, Any]:
        return {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}

    def test_drafts_rotate_as_the_target(self, target: sage.Target) -> None:
        """Interleaved axes; contiguous ones differ."""
        positions = torch.arange(30).view(3, 1, 10) * torch.tensor([1, 2, 3])[:, None, None]
        draft = random_draft(target, "eagle")
        theirs = target.text_model.rotary_emb(torch.zeros(1, dtype=torch.float32), positions)
        cos, sin = draft.rope(positions, torch.float32)
        torch.testing.assert_close(cos[:, 0], theirs[0].float(), atol=1e-5, rtol=0)
        torch.testing.assert_close(sin[:, 0], theirs[1].float(), atol=1e-5, rtol=0)
        draft.config.mrope_interleaved = False
        assert float((Rope(draft.config)(positions, torch.float32)[0][:, 0] - theirs[0]).abs().max()) > 0.1

    def test_negative_control_without_deepstack(self, target: sage.Target, monkeypatch: pytest.MonkeyPatch) -> None:
        inputs = self.prompts(target)["image"]
        monkeypatch.setattr(target.family, "text_inputs", lambda prompt: {})
        assert float((tree(target, target.embed(inputs)) - paths(target, inputs)).abs().max()) > 1e-3

    @pytest.mark.slow
    def test_exported_passes_are_its_paths(self, target: sage.Target) -> None:
        """As the compiler gets them: norms of queries and keys, interleaved axes, deepstack features in the prompt."""
        inputs = self.prompts(target)["image"]
        prompt, expected = target.embed(inputs), paths(target, inputs)
        for nodes in (5, 3):
            found = tree(target, prompt, nodes=nodes, executor=Exported())
            torch.testing.assert_close(found, expected[:nodes], atol=1e-11, rtol=0)

    def test_feature_levels_are_above_the_deepstack_layers(self) -> None:
        """Where the target has enough layers."""
        target = self.target_of(self.config())
        assert levels_for(target) == [2, 4, 5]
        target.num_layers = 36
        assert levels_for(target) == [4, 18, 33]

    def test_a_shallow_model_keeps_the_deepstack_layers(self, target: sage.Target) -> None:
        small = sage.new_draft(target, "model", num_layers=5).model
        own, theirs = small.text_model.layers, target.text_model.layers
        for new, old in enumerate((0, 1, 2, 4, 7)):
            torch.testing.assert_close(own[new].mlp.up_proj.weight, theirs[old].mlp.up_proj.weight)


@pytest.fixture
def sparse() -> sage.Target:
    """A mixture of experts in float32, with distinct experts for distinct tokens."""
    experts = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
    sizes = text(head_dim=8, rope_parameters=ROPE, **experts)
    config = Qwen3VLMoeConfig(text_config=sizes, vision_config=VISION, tie_word_embeddings=False, **QWEN_IDS)
    target = TestQwen3VL().target_of(config)
    target.model.float()
    return target


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_a_tree_of_a_mixture_of_experts_is_its_paths(sparse: sage.Target, experts: str) -> None:
    sparse.model.set_experts_implementation(experts)
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in TestQwen3VL().longest(sparse).items()}
    torch.testing.assert_close(tree(sparse, sparse.embed(inputs)), paths(sparse, inputs), atol=1e-3, rtol=0)


def test_parameters_of_a_mixture_of_experts(sparse: sage.Target) -> None:
    """Active are those of the chosen experts; a shallow model keeps the deepstack layers."""
    experts = sum(p.numel() for name, p in sparse.model.named_parameters() if ".experts." in name)
    assert experts == 8 * 8 * 3 * 16 * 32
    total = sum(p.numel() for p in sparse.model.parameters())
    assert sparse.family.active_parameters(sparse.model) == total - experts * 6 // 8
    small = sage.new_draft(sparse, "model", num_layers=5).model
    assert torch.equal(small.text_model.layers[2].mlp.experts.down_proj, sparse.text_model.layers[2].mlp.experts.down_proj)

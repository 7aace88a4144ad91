"""Gemma 4: heads of two sizes, shared keys, inputs of single layers, soft cap; dense and sparse, with and without images."""

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.data_helpers import train_step
from support.family_passes import Exported, paths, tree
from support.family_suite import END, EXACT, IMAGE, VIDEO, FamilySuite, text
from support.messages import refused
from support.models import greedy_text, token_fields
from support.pass_helpers import slow_except
from support.processors import byte_tokenizer_of
from transformers import Gemma4Config, Gemma4ImageProcessorPil, Gemma4TextConfig
from transformers.models.gemma4 import image_processing_pil_gemma4

import sage

image_processing_pil_gemma4._SUPPORTED_SOFT_TOKENS += (6,)  # the fewest published ones are 70
TOKENS = {"<pad>": 0, "<turn|>": END, "<|turn>": 2, "<bos>": 3, "<eos>": 4, "<|image>": 5, "<image|>": 6}
TOKENS |= {"<|image|>": IMAGE, "<|video|>": VIDEO}
LAYER_TYPES = (["sliding_attention"] * 3 + ["full_attention"]) * 2
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
VISION |= {"num_key_value_heads": 2, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 64}
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": 59}
EDGE = {"hidden_size_per_layer_input": 4, "num_kv_shared_layers": 4, "use_double_wide_mlp": True}  # as in E2B
LARGE = {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "use_bidirectional_attention": "vision"}  # as in 31B
SPARSE = LARGE | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16}


def texts(**more: Any) -> dict[str, Any]:
    """Returns text layers with a soft cap in the range of their logits."""
    own = {"head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0}
    sizes = text(tied=True, layer_types=LAYER_TYPES, sliding_window=8, **own | more)
    return sizes | {"vocab_size_per_layer_input": sizes["vocab_size"]}


class TestGemma4Text(FamilySuite):
    """The shared keys and inputs of single layers of the small sizes."""

    template = (
        "{{ bos_token }}{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for item in m.content %}"
        "{% if item.type == 'text' %}{{ item.text | trim }}{% else %}{{ '<|' + item.type + '|>' }}{% endif %}"
        "{% endfor %}{% endif %}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
    )

    def config(self) -> Any:
        return Gemma4TextConfig(**texts(**EDGE))

    def prepare_float64(self, model: Any) -> None:
        text_model: Any = model.get_decoder()
        for table in (text_model.embed_tokens, getattr(text_model, "embed_tokens_per_layer", None)):
            if table is not None:
                table.embed_scale.copy_(table.embed_scale.float())  # computed in the precision that the model is made in
        for layer in text_model.layers:
            layer.layer_scalar.fill_(0.875)
        model.set_experts_implementation("eager")

    def tokenizer(self) -> Any:
        tokenizer = byte_tokenizer_of(TOKENS, eos="<eos>")
        tokenizer.bos_token = "<bos>"
        return tokenizer

    def test_every_kind_of_draft_is_trained(self, target: sage.Target) -> None:
        """Some layers of a target whose layers differ are no model."""
        assert train_step(target, target.processor.collate([self.example(target)] * 2)) > 0
        with refused("draft.num_layers: 4", "layers of a gemma4", "differ", "draft.path"):
            sage.new_draft(target, "model", num_layers=4)


needs_its_videos = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"), reason="transformers lays out videos otherwise, and needs torchvision"
)


@needs_its_videos
class TestGemma4(TestGemma4Text):
    """The heads and the directions of the large sizes."""

    hf_processor = "Gemma4Processor"

    def config(self) -> Any:
        return Gemma4Config(text_config=texts(**LARGE), vision_config=VISION, **IDS)

    def image_processor(self) -> Any:
        return Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=6, pooling_kernel_size=2)

    def hugging_face(self, target: sage.Target) -> Any:
        theirs = super().hugging_face(target)
        written = theirs.replace_video_token

        def replace_video_token(pixels: Any, number: int) -> str:
            tokens = [int((places >= 0).all(-1).sum()) // 4 for places in pixels["video_position_ids"]]
            return written(pixels | {"num_soft_tokens_per_video": tokens[:1]}, number)

        theirs.replace_video_token = replace_video_token
        return theirs

    def hugging_face_settings(self, target: sage.Target) -> dict[str, Any]:
        return {"boi_token": "<|image>", "eoi_token": "<image|>"}

    def hugging_face_pixels(self, target: sage.Target, images: list[Any]) -> Any:
        return target.processor.image_processor(images)

    @pytest.mark.parametrize("lost", ["window", "directions"])
    def test_negative_control(self, target: sage.Target, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
        inputs = self.prompts(target)["two images"]
        expected, prompt = paths(target, inputs), target.embed(inputs)
        family: Any = type(target.family)
        if lost == "window":
            monkeypatch.setattr(family, "window", 1000)
        else:
            monkeypatch.setattr(family, "visible_in_windows", family.visible)
        assert float((tree(target, prompt) - expected).abs().max()) > 1e-3


OTHERS: dict[str, Any] = {
    "edge with images": lambda: Gemma4Config(text_config=texts(**EDGE), vision_config=VISION, **IDS),
    "sparse": lambda: Gemma4Config(text_config=texts(**SPARSE), vision_config=VISION, **IDS),
    "sparse text": lambda: Gemma4TextConfig(**texts(**SPARSE)),
}


@needs_its_videos
@pytest.mark.parametrize("name", slow_except(["edge with images"], [*OTHERS]))
def test_other_checkpoints(name: str) -> None:
    """Trees are their paths, in mixtures of experts and beside images too; texts are those of `generate`."""
    suite = TestGemma4()
    target = suite.target_of(OTHERS[name]())
    has_images = bool(target.family.slots)
    inputs = suite.prompts(target)["video and image"] if has_images else None
    inputs = inputs or token_fields(target, torch.randint(64, 300, (1, 12), generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(tree(target, target.embed(inputs)), paths(target, inputs), **EXACT)
    idle = sum(weight.numel() for weight in target.model.parameters()) - target.family.active_parameters(target.model)
    assert idle == (8 * 6 * 3 * 32 * 16 if "sparse" in name else 8 * 4 * target.vocab_size)
    assert target.family.mlp_width == 48 + 32 * ("sparse" in name)
    draft = sage.new_draft(target, "eagle", seed=0).double()
    expected, drawn = greedy_text(target, inputs, 6), set[tuple[int, ...]]()
    for policy in sage.POLICIES:
        assert sage.generate(target, draft, inputs, policy, max_new_tokens=6).tokens.tolist() == expected
        sampled = sage.generate(target, draft, inputs, policy, max_new_tokens=6, temperature=0.9, seed=3)
        drawn.add(tuple(sampled.tokens.tolist()))
    assert len(drawn) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "sizes"), [(TestGemma4Text, [1]), (TestGemma4, [3, 5])], ids=["edge", "large"])
def test_exported_passes_are_their_paths(suite: Any, sizes: list[int]) -> None:
    """Of one node and of several, by functions that do not depend on their number."""
    target = TestGemma4().target_of(suite().config())
    inputs = token_fields(target, torch.randint(64, 300, (1, 12), generator=torch.Generator().manual_seed(0)))
    prompt, expected = target.embed(inputs), paths(target, inputs)
    for nodes in sizes:
        torch.testing.assert_close(tree(target, prompt, nodes=nodes, executor=Exported()), expected[:nodes], **EXACT)

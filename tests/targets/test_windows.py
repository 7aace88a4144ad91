"""Gemma 3, whose layers have sliding windows, and SmolVLM."""

from typing import Any

import pytest
import torch
from support.family_passes import paths, tree
from support.family_suite import END, IMAGE, FamilySuite, text
from support.models import SIGLIP
from support.processors import byte_tokenizer_of, random_image
from transformers import (
    Gemma3Config,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Gemma3TextConfig,
    SmolVLMConfig,
    SmolVLMImageProcessorPil,
)

import sage

TOKENS = {"<pad>": 0, "<end_of_turn>": END, "<start_of_turn>": 2, "<bos>": 3, "<eos>": 4}
TOKENS |= {"<start_of_image>": 5, "<end_of_image>": 6, "<image_soft_token>": IMAGE}
LAYER_TYPES = (["sliding_attention"] * 3 + ["full_attention"]) * 2


class TestGemma3Text(FamilySuite):
    template = (
        "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% if m.content is string %}{{ m.content | trim }}"
        "{% else %}{% for item in m.content %}{% if item.type == 'image' %}<start_of_image>{% elif item.type == 'text' %}"
        "{{ item.text | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )

    def config(self) -> Any:
        return Gemma3TextConfig(**self.sizes())

    def sizes(self) -> dict[str, Any]:
        layers = {"layer_types": LAYER_TYPES, "sliding_window": 8, "query_pre_attn_scalar": 8}
        return text(head_dim=8, tied=True, **layers)

    def prepare_float64(self, model: Any) -> None:
        scale = model.get_input_embeddings().embed_scale  # computed in the precision that the model is made in
        scale.copy_(scale.float())

    def tokenizer(self) -> Any:
        tokenizer = byte_tokenizer_of(TOKENS, eos="<eos>")
        tokenizer.bos_token = "<bos>"
        return tokenizer


class TestGemma3(TestGemma3Text):
    has_video = False

    def config(self) -> Any:
        vision, tokens = SIGLIP | {"image_size": 16}, {"image_token_index": IMAGE, "boi_token_index": 5, "eoi_token_index": 6}
        return Gemma3Config(text_config=self.sizes(), vision_config=vision, mm_tokens_per_image=4, **tokens)

    def model(self) -> Any:
        model = super().model()
        projection = model.model.multi_modal_projector.mm_input_projection_weight  # zeros in a new model
        torch.nn.init.normal_(projection, generator=torch.Generator().manual_seed(0))
        return model

    def image_processor(self) -> Any:
        return Gemma3ImageProcessorPil(size={"height": 16, "width": 16})

    def hugging_face(self, target: sage.Target) -> Any:
        tokenizer = target.processor.tokenizer
        tokenizer.boi_token, tokenizer.eoi_token = "<start_of_image>", "<end_of_image>"
        tokenizer.image_token, tokenizer.boi_token_id = "<image_soft_token>", 5
        return Gemma3Processor(target.processor.image_processor, tokenizer, image_seq_length=4)

    def hugging_face_pixels(self, target: sage.Target, images: list[Any]) -> Any:
        return target.processor.image_processor(images)

    def test_crops_follow_their_image(self, target: sage.Target) -> None:
        crop = {"min_crop_size": 4, "max_num_crops": 4, "min_ratio_to_activate": 1.2}
        options = {f"pan_and_scan_{name}": value for name, value in crop.items()}
        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, do_pan_and_scan=True, **options)
        pictures = [random_image(8, 8), random_image(30, 11)]
        pixels, texts = target.family.encode_images(images, pictures), target.family.image_texts(images, [(8, 8), (30, 11)])
        theirs = self.hugging_face(target)
        assert len(pixels["pixel_values"]) == 5
        assert texts == [theirs.replace_image_token(images(pictures), i) for i in range(2)]

    def test_drafts_rotate_as_layers_with_full_attention(self, target: sage.Target) -> None:
        positions, draft = torch.arange(10)[None], sage.new_draft(target, "eagle", seed=0)
        theirs = target.text_model.rotary_emb(torch.zeros(1, dtype=torch.float32), positions, "full_attention")
        for ours, expected in zip(draft.rope(positions, torch.float32), theirs, strict=True):
            torch.testing.assert_close(ours[:, 0], expected.float(), atol=1e-5, rtol=0)

    @pytest.mark.parametrize("lost", ["window", "images"])
    def test_negative_control(self, target: sage.Target, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
        inputs = self.prompts(target)["two images"]
        expected, prompt = paths(target, inputs), target.embed(inputs)
        if lost == "window":
            monkeypatch.setattr(type(target.family), "window", 1000)
        else:
            monkeypatch.setattr(type(target.family), "visible", super(type(target.family), target.family).visible.__func__)
        assert float((tree(target, prompt) - expected).abs().max()) > 1e-3


VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 4}
SIZES = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
NAMES = ["<fake_token_around_image>", "<global-img>", *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2))]


def needs_torchvision() -> bool:
    """Whether the image processor without torchvision does not load without it, as in transformers 5.17."""
    try:
        SmolVLMImageProcessorPil()
    except ImportError:
        return True
    return False


pytestmark = pytest.mark.skipif(needs_torchvision(), reason="the image processor of this transformers needs torchvision")


class TestSmolVLM(FamilySuite):
    """Also Idefics3, whose code it is."""

    template = (
        "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
        "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )
    tokens = {"<image>": IMAGE, **{name: 4 + i for i, name in enumerate(NAMES)}}
    hf_processor, has_video, answer_prefix = "SmolVLMProcessor", False, " "

    def config(self) -> Any:
        text_config = {"model_type": "llama", **text()}
        return SmolVLMConfig(text_config=text_config, vision_config=VISION, image_token_id=IMAGE, scale_factor=2)

    def image_processor(self) -> Any:
        return SmolVLMImageProcessorPil(**SIZES)

    def tokenizer(self) -> Any:
        return byte_tokenizer_of({"<end_of_utterance>": END, "<|im_start|>": 2, **self.tokens}, eos="<end_of_utterance>")

    def hugging_face_settings(self, target: sage.Target) -> dict[str, Any]:
        names = {"global_image_tag": "<global-img>", "global_image_token": "<global-img>"}
        return {"fake_image_token": "<fake_token_around_image>", "image_seq_len": 4, **names}

    def hugging_face_pixels(self, target: sage.Target, images: list[Any]) -> Any:
        return target.processor.image_processor(images=[images], return_row_col_info=True)

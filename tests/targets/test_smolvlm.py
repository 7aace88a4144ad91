"""Idefics3 and SmolVLM."""

from __future__ import annotations

from typing import Any

import pytest
from support.family_suite import END, IMAGE, FamilySuite, text
from support.processors import byte_tokenizer_of
from transformers import Idefics3Config, Idefics3ImageProcessorPil, SmolVLMConfig, SmolVLMImageProcessorPil

import sage

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


class TestIdefics3(FamilySuite):
    template = (
        "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
        "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )
    tokens = {"<image>": IMAGE, **{name: 4 + i for i, name in enumerate(NAMES)}}
    hf_processor, has_video, answer_prefix = "Idefics3Processor", False, " "
    kinds: Any = (Idefics3Config, Idefics3ImageProcessorPil)

    def config(self) -> Any:
        text_config = {"model_type": "llama", **text()}
        return self.kinds[0](text_config=text_config, vision_config=VISION, image_token_id=IMAGE, scale_factor=2)

    def image_processor(self) -> Any:
        return self.kinds[1](**SIZES)

    def tokenizer(self) -> Any:
        return byte_tokenizer_of({"<end_of_utterance>": END, "<|im_start|>": 2, **self.tokens}, eos="<end_of_utterance>")

    def hugging_face_settings(self, target: sage.Target) -> dict[str, Any]:
        names = {"global_image_tag": "<global-img>", "global_image_token": "<global-img>"}
        return {"fake_image_token": "<fake_token_around_image>", "image_seq_len": 4, **names}

    def hugging_face_pixels(self, target: sage.Target, images: list[Any]) -> Any:
        return target.processor.image_processor(images=[images], return_row_col_info=True)


class TestSmolVLM(TestIdefics3):
    hf_processor, kinds = "SmolVLMProcessor", (SmolVLMConfig, SmolVLMImageProcessorPil)

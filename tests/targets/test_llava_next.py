"""LLaVA-NeXT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.family_suite import CLIP, END, IMAGE, VICUNA, FamilySuite, paths, text, tree
from support.processors import byte_tokenizer_of, image_part, user
from transformers import LlavaNextConfig, LlavaNextImageProcessorPil

import sage

TILES = [[8, 8], [8, 16], [16, 8], [16, 16]]


class TestLlavaNext(FamilySuite):
    """v1.6-mistral."""

    template = (
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' }}{% for content in message['content'] | "
        "selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}{% for content in message['content'] | "
        "selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}{{ ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'][0]['text'] + '</s> ' }}{% endif %}{% endfor %}"
    )
    has_video, hf_processor, answer_prefix = False, "LlavaNextProcessor", " "

    def tokenizer(self) -> Any:
        return byte_tokenizer_of({"</s>": END, "<image>": IMAGE}, eos="</s>")

    def config(self, text_type: str = "mistral") -> LlavaNextConfig:
        sizes = {"model_type": text_type, **text()} | ({"sliding_window": None} if text_type == "mistral" else {})
        return LlavaNextConfig(text_config=sizes, vision_config=CLIP, image_token_index=IMAGE, image_grid_pinpoints=TILES)

    def image_processor(self) -> Any:
        sizes = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
        return LlavaNextImageProcessorPil(image_grid_pinpoints=TILES, **sizes)

    def hugging_face_settings(self, target: sage.Target) -> dict[str, Any]:
        return {"patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}

    @pytest.mark.slow
    @pytest.mark.parametrize("text_type", ["llama", "qwen2"])
    def test_other_text_models(self, text_type: str) -> None:
        """v1.6-vicuna, with the template of LLaVA-1.5, and Qwen2."""
        target = self.target_of(self.config(text_type), VICUNA)
        assert target.processor.render(user(image_part(8, 8), "What?"), True) == "USER: <image>\nWhat? ASSISTANT:"
        inputs = self.prompts(target)["two images"]
        torch.testing.assert_close(tree(target, target.embed(inputs)), paths(target, inputs), atol=1e-11, rtol=0)

    def test_tiles_cover_the_image(self, target: sage.Target) -> None:
        """2 x 2 patches per tile: the base tile, and rows of patches that contain pixels with a newline each."""
        images = {(8, 8): 4 + 2 * 3, (16, 8): 4 + 2 * 5, (16, 16): 4 + 4 * 5, (16, 4): 4 + 2 * 5, (4, 16): 4 + 4 * 3}
        for (width, height), slots in images.items():
            inputs = target.prepare(user(image_part(width, height), "?"))
            assert int((inputs["input_ids"] == IMAGE).sum()) == slots, (width, height)

"""LLaVA-OneVision."""

from __future__ import annotations

from typing import Any

from support.family_suite import IMAGE, VIDEO, FamilySuite, text
from transformers import LlavaOnevisionConfig, LlavaOnevisionImageProcessorPil

import sage

TILES = [[8, 8], [8, 16], [16, 8]]


class TestLlavaOnevision(FamilySuite):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {% for p in m.content if p.type == 'image' %}<image>{% endfor %}"
        "{% for p in m.content if p.type == 'video' %}<video>{% endfor %}{% for p in m.content if p.type == 'text' %}\n"
        "{{ p.text }}{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokens = {"<image>": IMAGE, "<video>": VIDEO}
    hf_processor = "LlavaOnevisionProcessor"

    def config(self) -> LlavaOnevisionConfig:
        vision = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "vision_use_head": False}
        return LlavaOnevisionConfig(
            text_config={"model_type": "qwen2", **text()},
            vision_config=vision,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            image_grid_pinpoints=TILES,
        )

    def image_processor(self) -> Any:
        return LlavaOnevisionImageProcessorPil(size={"height": 8, "width": 8}, image_grid_pinpoints=TILES)

    def hugging_face_settings(self, target: sage.Target) -> dict[str, Any]:
        return {"num_image_tokens": 4, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"}

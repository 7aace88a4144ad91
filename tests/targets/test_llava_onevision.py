"""LLaVA-OneVision."""

from __future__ import annotations

from typing import Any

from support.family_suite import IMAGE, VIDEO, FamilySuite, text
from support.models import LLAVA_IDS, llava_config
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
        return llava_config(text(), LLAVA_IDS, TILES)

    def image_processor(self) -> Any:
        return LlavaOnevisionImageProcessorPil(size={"height": 8, "width": 8}, image_grid_pinpoints=TILES)

    def hugging_face_settings(self, target: sage.Target) -> dict[str, Any]:
        return {"num_image_tokens": 4, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"}

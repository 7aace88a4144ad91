"""Qwen2-VL."""

from __future__ import annotations

from typing import Any

from support.family_suite import QWEN_TEMPLATE, QWEN_TOKENS, FamilySuite, qwen_images, text
from support.models import QWEN_IDS
from transformers import Qwen2VLConfig


class TestQwen2VL(FamilySuite):
    template, tokens, hf_processor = QWEN_TEMPLATE, QWEN_TOKENS, "Qwen2VLProcessor"

    def config(self) -> Qwen2VLConfig:
        vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4}
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        return Qwen2VLConfig(text_config=text(rope_parameters=rope), vision_config=vision, **QWEN_IDS)

    def image_processor(self) -> Any:
        return qwen_images()

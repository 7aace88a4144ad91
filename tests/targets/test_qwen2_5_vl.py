"""Qwen2.5-VL."""

from __future__ import annotations

from typing import Any

from support.family_suite import QWEN_TEMPLATE, QWEN_TOKENS, FamilySuite, qwen_images, text
from support.models import QWEN_IDS
from transformers import Qwen2_5_VLConfig


class TestQwen2_5_VL(FamilySuite):
    template, tokens, hf_processor = QWEN_TEMPLATE, QWEN_TOKENS, "Qwen2_5_VLProcessor"

    def config(self) -> Qwen2_5_VLConfig:
        vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
        vision |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        return Qwen2_5_VLConfig(text_config=text(rope_parameters=rope), vision_config=vision, **QWEN_IDS)

    def image_processor(self) -> Any:
        return qwen_images()

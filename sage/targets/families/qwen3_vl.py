"""Qwen3-VL and its mixture of experts: deepstack features, interleaved M-RoPE, timestamps in the text of videos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from sage.inputs.format import Inputs
from sage.targets.families.qwen2_5_vl import Qwen2_5_VL
from sage.targets.family import Prompt, Visual
from sage.targets.rope import RopeConfig

DEEPSTACK = "deepstack"  # name of the extras: [tokens, layers, D], added to the outputs of the first text layers


class Qwen3_VL(Qwen2_5_VL):
    """Ref: Qwen3-VL technical report, arXiv 2511.21631, section 2."""

    model_types = {"qwen3_vl": "Qwen3VLForConditionalGeneration"}
    pixel_keys = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    served_by: ClassVar[tuple[str, ...]] = ("vLLM",)
    has_windows = False
    published_pixels = (256 * 256, 32 * 32 * 16384)

    def encode_videos(self, image_processor: Any, videos: list[list[Any]], fps: list[float]) -> tuple[Inputs, list[str]]:
        """Each temporal patch has its own delimiters, after the mean time of its first and last frame."""
        inputs, _ = super().encode_videos(image_processor, videos, fps)
        counts = (inputs["video_grid_thw"][:, 1:].prod(-1) // image_processor.merge_size**2).tolist()
        return inputs, self._video_texts(image_processor, counts, [len(frames) for frames in videos], fps)

    def _video_texts(
        self, image_processor: Any, counts: Sequence[int], frames: Sequence[int], fps: Sequence[float]
    ) -> list[str]:
        step, texts = image_processor.temporal_patch_size, []
        for count, total, rate in zip(counts, frames, fps, strict=True):
            pads = self.placeholders["video"] * count
            times = [min(frame, total - 1) / rate for frame in range(-(-total // step) * step)]  # an odd last one is repeated
            means = [(times[i] + times[i + step - 1]) / 2 for i in range(0, len(times), step)]
            texts.append("".join(f"<{mean:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for mean in means))
        return texts

    def _visual(self, out: Any) -> Visual:
        return Visual(out.pooler_output, {DEEPSTACK: torch.stack(tuple(out.deepstack_features), 1)})

    def text_inputs(self, prompt: Prompt) -> Inputs:
        deepstack = prompt.extras.get(DEEPSTACK)
        if deepstack is None or not len(deepstack):
            return {}
        return {"visual_pos_masks": prompt.visual_mask, "deepstack_visual_embeds": list(deepstack.unbind(1))}

    def rope(self) -> RopeConfig:
        return super().rope()._replace(interleaved=True)  # whatever the configuration says

    @property
    def leading_layers(self) -> int:
        return len(self.config.vision_config.deepstack_visual_indexes)


class Qwen3_VL_Moe(Qwen3_VL):
    """Its mixture of experts."""

    model_types = {"qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration"}
    served_by = ()

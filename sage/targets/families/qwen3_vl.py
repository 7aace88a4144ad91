"""Qwen3-VL: deepstack features, interleaved M-RoPE, timestamps in the text of videos; Qwen3.5: gated delta nets in three of
four text layers, with and without a vision tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from sage.inputs.format import Inputs
from sage.inputs.video import VideoSize
from sage.targets.families.qwen2_5_vl import Qwen2_5_VL
from sage.targets.families.text import Text
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

    def video_texts(self, image_processor: Any, videos: Sequence[VideoSize], fps: list[float]) -> list[str]:
        """Each temporal patch has its own delimiters, after the mean time of its first and last frame."""
        step, texts = image_processor.temporal_patch_size, []
        for (frames, *size), rate in zip(videos, fps, strict=True):
            pads = self.placeholders["video"] * self._tokens_of(image_processor, (size[0], size[1]))
            times = [min(frame, frames - 1) / rate for frame in range(-(-frames // step) * step)]  # an odd last one is repeated
            means = [(times[i] + times[i + step - 1]) / 2 for i in range(0, len(times), step)]
            texts.append("".join(f"<{mean:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for mean in means))
        return texts

    def _visual(self, out: Any) -> Visual:
        layers = getattr(out, "deepstack_features", None)
        return Visual(out.pooler_output, {DEEPSTACK: torch.stack(tuple(layers), 1)} if layers else {})

    def text_inputs(self, prompt: Prompt) -> Inputs:
        deepstack = prompt.extras.get(DEEPSTACK)
        if deepstack is None or not len(deepstack):
            return {}
        return {"visual_pos_masks": prompt.visual_mask, "deepstack_visual_embeds": list(deepstack.unbind(1))}

    def rope(self) -> RopeConfig:
        return super().rope()._replace(interleaved=True)  # whatever the configuration says


class Qwen3_VL_Moe(Qwen3_VL):
    """Its mixture of experts."""

    model_types = {"qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration"}
    served_by = ()


class Qwen3_5(Qwen3_VL):
    """Images, videos and positions are those of Qwen3-VL, without deepstack. Ref: Gated Delta Networks, arXiv 2412.06464."""

    model_types = {
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
        "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    }
    served_by = ()
    template_arguments = {"enable_thinking": False}


class Qwen3_5_Text(Text):
    """A checkpoint of the text model alone, whose positions have one axis, and Qwen3-Next."""

    model_types = {
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
        "qwen3_next": "Qwen3NextForCausalLM",
    }
    served_by = ()

    def rope(self) -> Any:
        return super().rope()._replace(section=None, interleaved=False)

"""Qwen2-VL: Qwen2.5-VL without windows in the vision tower, and without seconds in the positions of videos."""

from __future__ import annotations

from sage.targets.families.qwen2_5_vl import Qwen2_5_VL


class Qwen2_VL(Qwen2_5_VL):
    """Ref: Qwen2-VL, arXiv 2409.12191, sections 2.1 and 2.2."""

    model_types = {"qwen2_vl": "Qwen2VLForConditionalGeneration"}
    pixel_keys = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    served_by = ("vLLM",)
    needs_plugin = True
    has_windows = False

    @property
    def vision_sizes(self) -> tuple[int, int, int]:
        vision = self.config.vision_config  # its `hidden_size` is that of the output
        values = 3 * vision.patch_size**2 * vision.temporal_patch_size
        return vision.embed_dim, int(vision.embed_dim * vision.mlp_ratio), values

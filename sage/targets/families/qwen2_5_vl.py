"""Qwen2.5-VL and Qwen2-VL: patches of any resolution, M-RoPE positions (temporal, height, width)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from sage.inputs.format import Inputs
from sage.inputs.video import Size, VideoSize
from sage.targets.family import VISION, Family, Visual

PIXELS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
LAYOUT = ("position_ids", "cu_seqlens", "max_seqlen")  # arguments of the vision tower that depend on the grids alone
WINDOWS = ("window_index", "cu_window_seqlens", "max_window_seqlen")


class PatchProjection(nn.Module):
    """The patch embedding's `Conv3d` as a matrix product: its kernel and stride are the size of a patch, so it has one output.

    For such convolutions in bfloat16, cuDNN has no fast engine: seconds per image on an H100 (transformers issue 45750). On the
    CPU the convolution stays, whose result the matrix product differs from in rounding.
    """

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        assert convolution.kernel_size == convolution.stride
        self.stride = convolution.stride
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, patches: Tensor) -> Tensor:
        """[patches, C, *kernel] -> [patches, D], on the CPU [patches, D, 1, 1, 1]."""
        if patches.device.type == "cpu":
            return nn.functional.conv3d(patches, self.weight, self.bias, self.stride)
        return self.linear(patches)

    def linear(self, patches: Tensor) -> Tensor:
        """[patches, C, *kernel] -> [patches, D]."""
        return nn.functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)


class Qwen2_5_VL(Family):
    """Ref: Qwen2.5-VL technical report, arXiv 2502.13923, sections 2.1 (vision encoder) and 2.1.2 (M-RoPE)."""

    model_types = {"qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration"}
    placeholders = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    published_pixels: ClassVar[Size | None] = (56 * 56, 28 * 28 * 16384)
    served_by: ClassVar[tuple[str, ...]] = ("vLLM", "SGLang")
    is_packed = True
    has_windows: ClassVar[bool] = True  # in most layers of the vision tower
    pixel_keys: ClassVar[tuple[str, ...]] = (
        "pixel_values",
        "image_grid_thw",
        "pixel_values_videos",
        "video_grid_thw",
        "second_per_grid_ts",
    )

    def encode_images(self, image_processor: Any, images: list[Any]) -> Inputs:
        out = image_processor(images=images, return_tensors="pt")
        return {key: out[key] for key in PIXELS["image"]}

    def encode_videos(self, image_processor: Any, videos: list[list[Any]], fps: list[float]) -> Inputs:
        """Groups `temporal_patch_size` consecutive frames into a patch; an odd last frame is repeated."""
        patches, grids = zip(*(self._encode_video(image_processor, frames) for frames in videos), strict=True)
        inputs = {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.stack(grids)}
        if "second_per_grid_ts" in self.pixel_keys:
            inputs["second_per_grid_ts"] = torch.tensor([image_processor.temporal_patch_size / rate for rate in fps])
        return inputs

    def _encode_video(self, image_processor: Any, frames: list[Any]) -> tuple[Tensor, Tensor]:
        """One video -> patches [t*h*w, C*s*p*p] and its grid [3], from the patches of its frames as images.

        The patch of an image repeats one frame s = temporal_patch_size times; that of a video holds s consecutive frames.
        """
        step = image_processor.temporal_patch_size
        frames = frames + [frames[-1]] * (-len(frames) % step)
        out = image_processor(images=frames, return_tensors="pt")
        grid = out["image_grid_thw"]
        if bool((grid != grid[0]).any()):
            raise ValueError("video: frames of different sizes; resize them to one size first")
        height, width = int(grid[0, 1]), int(grid[0, 2])
        pixels = out["pixel_values"]
        channels = len(image_processor.image_mean)
        per_frame = pixels.view(len(frames) // step, step, height * width, channels, step, -1)[..., 0, :]
        patches = per_frame.permute(0, 2, 3, 1, 4).reshape(-1, pixels.shape[-1])
        return patches, torch.tensor([len(frames) // step, height, width])

    def image_texts(self, image_processor: Any, sizes: Sequence[Size]) -> list[str]:
        return [self.placeholders["image"] * self._tokens_of(image_processor, size) for size in sizes]

    def video_texts(self, image_processor: Any, videos: Sequence[VideoSize], fps: list[float]) -> list[str]:
        step, counts = image_processor.temporal_patch_size, [self._tokens_of(image_processor, video[1:]) for video in videos]
        each = zip(videos, counts, strict=True)
        return [self.placeholders["video"] * (-(-video.frames // step) * count) for video, count in each]

    def _tokens_of(self, image_processor: Any, size: Size) -> int:
        """Visual tokens of an image, or of a temporal patch of a video, of this width and height."""
        (width, height), patch = size, image_processor.patch_size
        if image_processor.do_resize:
            patches = int(image_processor.get_number_of_image_patches(height, width))
        else:
            patches = (height // patch) * (width // patch)
        return patches // image_processor.merge_size**2

    def token_inputs(self, input_ids: Tensor) -> Inputs:
        kinds = torch.zeros_like(input_ids, dtype=torch.int32)
        kinds[input_ids == self.slots["image"]] = 1
        kinds[input_ids == self.slots["video"]] = 2
        return {"mm_token_type_ids": kinds}

    def optimize(self, model: Any) -> None:
        patch_embed = model.model.visual.patch_embed
        if isinstance(patch_embed.proj, nn.Conv3d):
            patch_embed.proj = PatchProjection(patch_embed.proj)

    def visual_features(self, model: Any, inputs: Inputs) -> dict[int, Visual]:
        vision, features = model.model.visual, {}
        for kind, (pixels, grid) in PIXELS.items():
            if inputs.get(pixels) is not None:
                known = {name: inputs[key] for name in self._layout_names if (key := f"{VISION}{kind}.{name}") in inputs}
                out = vision(inputs[pixels].to(vision.dtype), grid_thw=inputs[grid], return_dict=True, **known)
                features[self.slots[kind]] = self._visual(out)
        return features

    def _visual(self, out: Any) -> Visual:
        return Visual(out.pooler_output)

    @property
    def _layout_names(self) -> tuple[str, ...]:
        return (*LAYOUT, *(WINDOWS if self.has_windows else ()))

    def vision_layout(self, inputs: Inputs) -> Inputs:
        layout: Inputs = {}
        for kind, (_, grid) in PIXELS.items():
            if inputs.get(grid) is not None:
                layout |= {f"{VISION}{kind}.{name}": value for name, value in self._layout(inputs[grid]).items()}
        return layout

    def _layout(self, grid: Tensor) -> dict[str, Any]:
        """Returns what the vision tower computes from the grids [images, 3] (transformers.vision_utils), by argument."""
        vision = self.config.vision_config
        ends = get_vision_cu_seqlens(grid)
        values = [get_vision_position_ids(grid, vision.spatial_merge_size), ends, _longest(ends)]
        if self.has_windows:
            sizes = (vision.spatial_merge_size, vision.window_size, vision.patch_size)
            index, window_ends = get_vision_window_index(grid, *sizes)
            values += [index, window_ends, _longest(window_ends)]
        return dict(zip(self._layout_names, values, strict=True))

    def positions(self, model: Any, inputs: Inputs, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        input_ids = inputs["input_ids"]
        kinds = inputs.get("mm_token_type_ids")
        if kinds is None:
            kinds = self.token_inputs(input_ids)["mm_token_type_ids"]
        position_ids, deltas = model.model.get_rope_index(
            input_ids,
            mm_token_type_ids=kinds,
            image_grid_thw=inputs.get("image_grid_thw"),
            video_grid_thw=inputs.get("video_grid_thw"),
            second_per_grid_ts=inputs.get("second_per_grid_ts"),
            attention_mask=attention_mask,
        )
        # The delta is relative to the sequence's own length, so padding does not change the next position.
        return position_ids, attention_mask.sum(-1) + deltas.view(-1)

    def decode_positions(self, position_N: Tensor) -> Tensor:
        return position_N.view(1, 1, -1).expand(3, 1, -1)


class Qwen2_VL(Qwen2_5_VL):
    """Without windows in the vision tower, and without seconds in the positions of videos. Ref: Qwen2-VL, arXiv 2409.12191."""

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


def _longest(ends: Tensor) -> int:
    return int(ends.diff().max())

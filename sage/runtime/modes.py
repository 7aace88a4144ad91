"""How passes and the vision tower's attention run, and what weights are quantized to, as users name it. Imports no torch.

Some vision towers take all images as one packed sequence, and Qwen2.5-VL attends within windows of 64 patches in most layers.
With `sdpa`, transformers runs one call per part, 840 for an image of 640 x 480; with flash-attn, or torch's own flash kernel
for packed sequences (`varlen`), one per layer.
"""

from __future__ import annotations

from enum import StrEnum
from importlib.util import find_spec

from sage.io.ranges import choose

MANY_ANSWERS = 300  # compiling takes as long as decoding about as many short answers


class PassMode(StrEnum):
    """How passes of the target and the draft run.

    Attributes:
        eager: kernel by kernel; the reference.
        compiled: as functions compiled ahead of time by Inductor, kept on disk.
        captured: as CUDA graphs, one per bucket of nodes and keys.
        auto: captured on a GPU, if the first pass of each shape equals the eager one; compiled on a CPU for work of many
            answers; else eager.
    """

    eager = "eager"
    compiled = "compiled"
    captured = "captured"
    auto = "auto"


def resolve_pass_mode(name: str, device_type: str, num_answers: int = 1, is_whole: bool = True) -> PassMode:
    """Returns `eager`, `compiled` or `captured`, or on a GPU `auto`: captured, and compared with eager passes.

    Args:
        name: one of `PassMode`.
        num_answers: number of answers that will be decoded; `auto` compiles on a CPU from `MANY_ANSWERS` on.
        is_whole: whether all weights of the target are on one device; else its passes are eager.

    Raises:
        ValueError: an unknown name, or `captured` without a GPU.
    """
    mode = choose("passes", name, PassMode)
    if mode is PassMode.captured and device_type != "cuda":
        raise ValueError(f"passes: captured needs a GPU, and the device is {device_type}; choose eager, compiled or auto")
    if not is_whole:
        return PassMode.eager
    if mode is not PassMode.auto:
        return mode
    if device_type == "cuda":
        return PassMode.auto
    return PassMode.compiled if device_type == "cpu" and num_answers >= MANY_ANSWERS else PassMode.eager


class Quantize(StrEnum):
    """What the weights of a target's linear layers, except lm_head, are quantized to when it is loaded; activations are not.

    Attributes:
        int8: with a scale per row, by torchao.
        nf4: 4 bits with a scale per 64 weights, by bitsandbytes.
        fp8: float8 e4m3 with a scale per row, by torchao.
    """

    int8 = "int8"
    nf4 = "nf4"
    fp8 = "fp8"

    @property
    def library(self) -> str:
        return "bitsandbytes" if self is Quantize.nf4 else "torchao"


class VisionAttention(StrEnum):
    """Choices of `target.attention`; `auto` takes a flash kernel where one runs: flash-attn if it is installed, else varlen."""

    auto = "auto"
    eager = "eager"
    sdpa = "sdpa"
    flash_attention_2 = "flash_attention_2"
    varlen = "varlen"


def check_attention(name: str) -> VisionAttention:
    """Returns the choice with a name; ValueError if it is unknown or its package is not installed."""
    choice = choose("target.attention", name, VisionAttention)
    if choice is VisionAttention.flash_attention_2 and not has_flash_attention():
        raise ValueError(
            "target.attention: flash_attention_2 needs the package flash-attn, which is not installed; install it, or use auto"
        )
    return choice


def has_flash_attention() -> bool:
    """Whether the package flash-attn is installed."""
    return find_spec("flash_attn") is not None


def resolve_attention(
    choice: VisionAttention, device_type: str, is_half: bool, is_packed: bool, is_ampere: bool
) -> VisionAttention:
    """Returns the attention to use; ValueError for a flash kernel on another device than a GPU or in another dtype, and for
    `varlen` without a packed sequence or on an older GPU.

    Args:
        is_half: whether the target is in float16 or bfloat16.
        is_packed: whether the vision tower attends within the parts of a packed sequence.
        is_ampere: whether the device is an NVIDIA GPU of compute capability 8.0 or higher, which torch's flash kernel needs.
    """
    fits_flash = device_type == "cuda" and is_half
    if choice is VisionAttention.auto:
        if fits_flash and has_flash_attention():
            return VisionAttention.flash_attention_2
        return VisionAttention.varlen if fits_flash and is_packed and is_ampere else VisionAttention.sdpa
    if choice is VisionAttention.varlen and not is_packed:
        raise ValueError(
            "target.attention: varlen is for vision towers with packed images (qwen2_vl, qwen2_5_vl, qwen3_vl); use auto"
        )
    if choice in (VisionAttention.flash_attention_2, VisionAttention.varlen) and not fits_flash:
        precision = "half precision" if is_half else "full precision"
        raise ValueError(
            f"target.attention: {choice} needs a GPU and a target in bf16 or fp16; this one is on {device_type} in "
            f"{precision}; use auto"
        )
    if choice is VisionAttention.varlen and not is_ampere:
        raise ValueError("target.attention: varlen needs an NVIDIA GPU of compute capability 8.0 or higher; use auto")
    return choice

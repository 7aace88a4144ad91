"""The ways to run a pass, as users name them. Imports no torch."""

from __future__ import annotations

from enum import StrEnum

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


def check_pass_mode(name: str) -> PassMode:
    """Returns the mode of this name; ValueError for an unknown one."""
    if name not in tuple(PassMode):
        raise ValueError(f"passes: {name!r} is unknown; choose one of {', '.join(PassMode)}")
    return PassMode(name)


def resolve_pass_mode(name: str, device_type: str, num_answers: int = 1, is_whole: bool = True) -> PassMode:
    """Returns `eager`, `compiled` or `captured`, or on a GPU `auto`: captured, and compared with eager passes.

    Args:
        name: one of `PassMode`.
        num_answers: number of answers that will be decoded; `auto` compiles on a CPU from `MANY_ANSWERS` on.
        is_whole: whether all weights of the target are on one device; else its passes are eager.

    Raises:
        ValueError: an unknown name, or `captured` without a GPU.
    """
    mode = check_pass_mode(name)
    if mode is PassMode.captured and device_type != "cuda":
        raise ValueError(f"passes: captured needs a GPU, and the device is {device_type}; choose eager, compiled or auto")
    if not is_whole:
        return PassMode.eager
    if mode is not PassMode.auto:
        return mode
    if device_type == "cuda":
        return PassMode.auto
    return PassMode.compiled if device_type == "cpu" and num_answers >= MANY_ANSWERS else PassMode.eager

"""Names of dtypes: "float32" in files and in Python, "fp32" in configurations and on command lines. Imports torch on use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LONG_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SHORT_NAMES = {long: short for short, long in LONG_NAMES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """Returns the dtype with a long or short name. Raises ValueError for an unknown name."""
    import torch

    long = LONG_NAMES.get(name, name)
    if long not in SHORT_NAMES:
        raise ValueError(f"dtype: {name!r}; allowed: {', '.join([*LONG_NAMES, *SHORT_NAMES])}")
    return getattr(torch, long)


def loaded_dtype(published: str | None) -> str:
    """Returns the long name of a target's default dtype from that of its checkpoint, by any name; None if it is unknown.

    A target published in float16 runs in bfloat16 everywhere: drafts learn from its features in that dtype.
    """
    return "float32" if LONG_NAMES.get(str(published), str(published)) == "float32" else "bfloat16"


def dtype_name(dtype: torch.dtype | None) -> str:
    """Returns the long name of any torch dtype."""
    return str(dtype).removeprefix("torch.")

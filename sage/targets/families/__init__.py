"""The target families: one module each, with one `Family`, and the list of them."""

from __future__ import annotations

from typing import Any

from sage.targets.families.llava_onevision import LlavaOnevision
from sage.targets.families.qwen2_5_vl import Qwen2_5_VL
from sage.targets.family import Family

FAMILIES: tuple[type[Family], ...] = (Qwen2_5_VL, LlavaOnevision)


def family_of(config: Any, where: str = "") -> Family:
    """Returns the family of a configuration; ValueError, prefixed by `where`, names the known ones if it is unknown."""
    for family in FAMILIES:
        if config.model_type == family.model_type:
            return family(config)
    known = ", ".join(family.model_type for family in FAMILIES)
    raise ValueError(f"target: {where}model_type {config.model_type!r} is not a known family; known: {known}")

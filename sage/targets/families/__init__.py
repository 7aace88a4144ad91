"""The target families: one module each. Every `Family` in a module of this folder with `model_types` is known."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from sage.targets.family import Family
from sage.targets.text_checks import check_text_model, check_text_type


def _discover() -> dict[str, type[Family]]:
    """Returns `model_type` -> family."""
    found: dict[str, type[Family]] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        module = import_module(f"{__name__}.{name}")
        own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
        for family in own:
            if issubclass(family, Family):
                found |= dict.fromkeys(family.model_types, family)
    return found


FAMILIES = _discover()
TEXT_TYPES = tuple(name for name, family in FAMILIES.items() if not family.placeholders)  # families of text alone


def family_of(config: Any, where: str = "target: ") -> Family:
    """Returns the family of a configuration.

    Raises:
        ValueError: prefixed by `where`, the family is unknown (names the known ones), or a text model that the decoder does not
            support (names the reason), or a vision tower that the family does not take.
    """
    check_text_model(config, where)
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(f"{where}model_type {config.model_type!r} is not a known family; known: {', '.join(FAMILIES)}")
    check_text_type(config, TEXT_TYPES, where)
    tower = getattr(getattr(config, "vision_config", None), "model_type", None)
    if family.vision_types and tower not in family.vision_types:
        raise ValueError(
            f"{where}{config.model_type} with a vision tower of model_type {tower!r}, which is not supported; supported: "
            f"{', '.join(family.vision_types)}"
        )
    return family(config)

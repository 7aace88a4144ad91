"""The target families: every `Family` in a module of this folder with `model_types` is known; text models that are refused."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from sage.targets.family import FULL, LINEAR, SLIDING, Family

# Text models whose linear layers `sage.targets.delta_net` runs over trees.
GATED_DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
REASONS = {  # layer type -> why a tree pass cannot run it
    "linear_attention": f"linear attention over a tree is implemented for the text models {', '.join(GATED_DELTA)} only",
    "chunked_attention": "chunked attention is not implemented; a tree pass would attend beyond the chunk",
    "mamba": "recurrent layers keep one state for all tokens, which a tree mask cannot split",
    "conv": "convolutions over the tokens mix the branches of a tree",
}
LAYER_SIZES = {"head_dim", "num_key_value_heads"}  # in which layers may differ
SINKS = ("gpt_oss",)  # model types whose attention has sinks; no field of the configuration says so


def _discover() -> dict[str, type[Family]]:
    """Returns `model_type` -> family."""
    families: dict[str, type[Family]] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        module = import_module(f"{__name__}.{name}")
        classes = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
        for family in classes:
            if issubclass(family, Family):
                families |= dict.fromkeys(family.model_types, family)
    return families


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
    text_type = config.get_text_config().model_type
    if not text_type.startswith(config.model_type) and text_type not in TEXT_TYPES:
        raise ValueError(
            f"{where}{config.model_type} with a text model of model_type {text_type!r}, which is not supported; supported: "
            f"{', '.join(sorted(TEXT_TYPES))}"
        )
    tower = getattr(getattr(config, "vision_config", None), "model_type", None)
    if family.vision_types and tower not in family.vision_types:
        raise ValueError(
            f"{where}{config.model_type} with a vision tower of model_type {tower!r}, which is not supported; supported: "
            f"{', '.join(family.vision_types)}"
        )
    return family(config)


def check_text_model(config: Any, where: str) -> None:
    """Raises ValueError, prefixed by `where`, for a target whose text model a tree pass cannot run under any mask."""
    text, model = config.get_text_config(), config.model_type
    known = {FULL, SLIDING, LINEAR} if text.model_type in GATED_DELTA else {FULL, SLIDING}
    cap = getattr(text, "attn_logit_softcapping", None)
    if unknown := set(getattr(text, "layer_types", None) or ()) - known:
        reason = REASONS.get(min(unknown), f"tree passes support layers of type {FULL} and {SLIDING} only")
        problem = f"{model} has layers of type {min(unknown)}: {reason}"
    elif differing := set(getattr(text, "per_layer_attributes", None) or ()) - LAYER_SIZES:
        problem = f"{model} has layers that differ in {', '.join(sorted(differing))}; only their heads may differ"
    elif cap is not None:
        problem = f"attn_logit_softcapping={cap}: tree attention has no soft cap"
    elif getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        problem = "use_bidirectional_attention=true: it embeds texts and generates none"
    elif text.model_type in SINKS:
        problem = f"{model} has attention sinks, which tree attention does not implement"
    else:
        return
    raise ValueError(f"{where}{problem}; choose another target")

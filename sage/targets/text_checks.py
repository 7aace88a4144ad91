"""Text models that the decoder does not support, and the reason: checked for every target before its weights are loaded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sage.targets.family import FULL, LINEAR, SLIDING

# Text models whose linear layers `sage.targets.delta_net` runs over trees.
GATED_DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
REASONS = {  # layer type -> why a tree pass cannot run it
    "linear_attention": f"linear attention over a tree is implemented for the text models {', '.join(GATED_DELTA)} only",
    "chunked_attention": "chunked attention is not implemented; a tree pass would attend beyond the chunk",
    "mamba": "recurrent layers keep one state for all tokens, which a tree mask cannot split",
    "conv": "convolutions over the tokens mix the branches of a tree",
}
SINKS = ("gpt_oss",)  # model types whose attention has sinks; no field of the configuration says so


def check_text_model(config: Any, where: str) -> None:
    """Raises ValueError, prefixed by `where`, for a target whose text model a tree pass cannot run under any mask."""
    text = config.get_text_config()
    known = {FULL, SLIDING, LINEAR} if text.model_type in GATED_DELTA else {FULL, SLIDING}
    if unknown := set(getattr(text, "layer_types", None) or ()) - known:
        kind = min(unknown)
        reason = REASONS.get(kind, f"tree passes support layers of type {FULL} and {SLIDING} only")
        raise ValueError(f"{where}{config.model_type} has layers of type {kind}: {reason}; choose another target")
    if getattr(text, "is_heterogeneous", False):
        raise ValueError(
            f"{where}{config.model_type} has layers that differ in {', '.join(sorted(text.per_layer_attributes))}; the cache "
            f"has one size for all layers; choose another target"
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(text, key, None) is not None:
            raise ValueError(
                f"{where}{key}={getattr(text, key)}: soft caps are not implemented, in tree attention and in drafts; "
                f"choose another target"
            )
    if getattr(text, "use_bidirectional_attention", None) is True:
        raise ValueError(f"{where}use_bidirectional_attention=true: it embeds texts and generates none; choose another target")
    if text.model_type in SINKS:
        raise ValueError(
            f"{where}{config.model_type} has attention sinks, which tree attention does not implement; choose another target"
        )


def check_text_type(config: Any, text_types: Collection[str], where: str) -> None:
    """Raises ValueError, prefixed by `where`, if a vision-language model of a known family has a text model that is neither
    its own nor one of `text_types`, which are supported alone.
    """
    outer, inner = config.model_type, config.get_text_config().model_type
    if not inner.startswith(outer) and inner not in text_types:
        raise ValueError(
            f"{where}{outer} with a text model of model_type {inner!r}, which is not supported; supported: "
            f"{', '.join(sorted(text_types))}"
        )

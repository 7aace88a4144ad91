"""Whether a format and the engines that load it can express a draft. What cannot be expressed is refused before any write."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from checkpoints.export.formats.layout import FEATURE_LEVELS, Flavour, Format, are_valid_levels
from checkpoints.export.target_facts import TargetFacts
from sage.drafts.registry import head_kind

SERVED_FAMILIES = ("qwen2_5_vl",)  # by vLLM 0.33 and SGLang 0.5.23; neither serves LLaVA-OneVision
COMPRESSOR = "compressor"  # config field and module name of the visual compressor
EXPRESSED_FIELDS = (  # config fields that the formats contain or that this module checks
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_theta", "mrope_section", "scaled_rope"),
    "initializer_range",
    *("image_inputs", "target", "target_path", "input_norm", "feature_levels", "draft_vocab_size", "norm_before_residual"),
    COMPRESSOR,
)


def check_compatible(
    config: Any,
    facts: TargetFacts,
    format_: Format,
    flavour: Flavour | None,
    *,
    allow_unserved: bool = False,
    allow_uncompressed: bool = False,
) -> list[str]:
    """Checks that the format, and the engines that load it, compute what the draft computes.

    Args:
        config: the trained head's configuration.
        facts: facts about its target.
        allow_unserved: export although no engine serves the target's family.
        allow_uncompressed: export without the draft's visual compressor; engines feed it every visual token.

    Returns:
        warnings for the model card about what differs from training, as complete sentences.

    Raises:
        ValueError: names the field and the remedy.
    """
    _check_format(config, format_, flavour)
    if config.target != facts.fingerprint:
        raise ValueError(f"--target {facts.name}: is {facts.fingerprint}, the draft was made for {config.target}")
    _check_rope(config, facts)
    warnings = _check_family(facts, allow_unserved)
    if format_ == Format.eagle and config.input_norm:
        raise ValueError(
            "draft.input_norm: true, but the engines' `eagle` layer has no input_layernorm, so its attention's input would "
            "differ from training; train with draft.input_norm=false, or train draft=eagle3"
        )
    if format_ == Format.eagle3 and config.norm_before_residual:
        raise ValueError(
            "draft.norm_before_residual: true, which SGLang does not support; --format speculators serves it with vLLM"
        )
    if format_ != Format.eagle and not are_valid_levels(list(config.feature_levels), facts.num_layers):
        raise ValueError(
            f"draft.feature_levels: {list(config.feature_levels)} cannot be served: engines fuse exactly {FEATURE_LEVELS} "
            f"increasing levels of 0..{facts.num_layers - 1}; train with such levels"
        )
    warnings += _check_compressor(config, allow_uncompressed)
    _check_other_fields(config, format_)
    return warnings + _position_warnings(config, facts, format_, flavour)


def _check_format(config: Any, format_: Format, flavour: Flavour | None) -> None:
    kind = head_kind(config.model_type)
    formats = kind.export_formats if kind else ()
    if format_ not in formats:
        listed = ", ".join(formats) or "none"
        raise ValueError(f"--format {format_}: the draft is a {config.model_type}; formats for it: {listed}")
    if format_ == Format.eagle and flavour is None:
        raise ValueError(f"--flavour: missing; `eagle` differs between engines: give one of {', '.join(Flavour)}")
    if format_ != Format.eagle and flavour is not None:
        raise ValueError(f"--flavour {flavour}: only the format `eagle` has flavours; {format_} has none")


def _check_rope(config: Any, facts: TargetFacts) -> None:
    for key in ("rope_theta", "mrope_section", "scaled_rope"):
        own, targets = getattr(config, key), getattr(facts, key)
        if own != targets:
            raise ValueError(f"draft.{key}: {own}, the target's is {targets}: engines give a draft the target's positions")
    if facts.scaled_rope and facts.mrope_section:
        raise ValueError(
            f"draft.scaled_rope: {facts.scaled_rope['rope_type']} with mrope_section {facts.mrope_section}: engines are not "
            f"known to support both in a draft; decode with sage-generate"
        )


def _check_family(facts: TargetFacts, allow_unserved: bool) -> list[str]:
    if facts.model_type in SERVED_FAMILIES:
        return []
    problem = f"no engine serves drafts for {facts.model_type} (vLLM 0.33 and SGLang 0.5.23 do not)"
    if not allow_unserved:
        raise ValueError(f"target: {problem}; only sage-generate and sage.generate do; --allow-unserved exports it anyway")
    return [f"{problem[0].upper()}{problem[1:]}; only the included decoder does."]


def _check_compressor(config: Any, allow_uncompressed: bool) -> list[str]:
    chosen = getattr(config, COMPRESSOR, None)
    if not chosen:
        return []
    compressor = format_compressor(chosen)
    if not allow_uncompressed:
        raise ValueError(
            f"draft.compressor: {compressor}: no engine supports one: vLLM and SGLang feed a draft every visual token, which "
            f"this draft was not trained on; train with draft/compressor=none, or export the draft without it with "
            f"--allow-uncompressed"
        )
    return [
        f"Trained with a visual compressor ({compressor}), which engines do not support and which is not exported: engines "
        f"feed the draft every visual token, which it was not trained on. Reported measurements were made with the compressor."
    ]


def format_compressor(chosen: dict[str, Any]) -> str:
    """Formats a compressor's configuration: `pool ratio=20`."""
    return " ".join([chosen["kind"], *(f"{key}={value}" for key, value in chosen.items() if key != "kind")])


def _check_other_fields(config: Any, format_: Format) -> None:
    """Refuses every field that no exporter writes, unless it has its default value."""
    known = {*PreTrainedConfig().to_dict(), *EXPRESSED_FIELDS}
    default = type(config)().to_dict()
    for key, value in config.to_dict().items():
        if key in known or key.startswith("_") or value in (None, {}, [], default.get(key)):
            continue
        raise ValueError(f"draft.{key}: {value!r} cannot be expressed in the format {format_}; train without it")


def _position_warnings(config: Any, facts: TargetFacts, format_: Format, flavour: Flavour | None) -> list[str]:
    """Warns about engines whose draft inputs at image positions differ from training."""
    if facts.model_type not in SERVED_FAMILIES:
        return []
    of_flavour = ["vLLM" if flavour == Flavour.vllm else "SGLang"]
    engines = {Format.eagle3: ["vLLM", "SGLang"], Format.speculators: ["vLLM"]}.get(format_, of_flavour)
    fed = {"vLLM": "token", "SGLang": "embed"}
    names = {"token": "the placeholder token's embedding", "embed": "the visual embedding"}
    warnings = [
        f"At image positions {engine} feeds the draft {names[fed[engine]]}; it was trained with {names[config.image_inputs]}: "
        f"expect lower acceptance there (train with draft.image_inputs={fed[engine]} for this engine)."
        for engine in engines
        if fed[engine] != config.image_inputs
    ]
    if flavour == Flavour.sglang and facts.mrope_section:
        warnings.append(
            "SGLang's EAGLE-1/2 layer uses plain text positions, not M-RoPE: after an image they differ from training."
        )
    return warnings

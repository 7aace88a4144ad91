"""What a format cannot say: refused by name before anything is written, or exported without it on explicit demand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from checkpoints.export.facts import TargetFacts
from checkpoints.export.formats.layout import FEATURE_LEVELS, Flavour, Format
from sage.drafts.registry import head_kind

SERVED_FAMILIES = ("qwen2_5_vl",)  # by vLLM 0.33 and SGLang 0.5.23; LLaVA-OneVision by neither
COMPRESSOR = "compressor"  # field of a config and name of a module: what the draft reads of pictures, not how it reads it


@dataclass
class Allowed:
    """What the user accepts to lose.

    Attributes:
        unserved: no engine serves the target's family.
        uncompressed: the draft's visual compressor stays behind; engines give it every visual token.
        warnings: filled in by the checks: sentences for the card.
    """

    unserved: bool = False
    uncompressed: bool = False
    warnings: list[str] = field(default_factory=list)


def check_expressible(draft: Any, facts: TargetFacts, format_: Format, flavour: Flavour | None, allowed: Allowed) -> None:
    """Refuses a draft that the format, or every engine, would turn into something else.

    Args:
        draft: the trained head; only its config and tensor names are read.
        allowed: collects warnings about what is exported although something is lost.

    Raises:
        ValueError: names the field and what to do.
    """
    config = draft.config
    _check_kind(config, format_, flavour)
    if config.target != facts.fingerprint:
        raise ValueError(f"--target {facts.name}: is {facts.fingerprint}, the draft was made for {config.target}")
    _check_rope(config, facts)
    _check_family(facts, allowed)
    if format_ == Format.eagle and config.input_norm:
        raise ValueError(
            "draft.input_norm: true, but the engines' `eagle` layer has no input_layernorm, so its attention would see other "
            "numbers than in training; train with draft.input_norm=false, or train draft=eagle3"
        )
    if format_ == Format.eagle3 and config.norm_before_residual:
        raise ValueError(
            "draft.norm_before_residual: true, which SGLang cannot compute; --format speculators serves it with vLLM"
        )
    if format_ != Format.eagle:
        _check_levels(config.feature_levels, facts)
    _check_compressor(config, allowed)
    _check_other_fields(config, format_)
    allowed.warnings += _position_warnings(config, facts, format_, flavour)


def _check_kind(config: Any, format_: Format, flavour: Flavour | None) -> None:
    kind = head_kind(config.model_type)
    fitting = kind.export_formats if kind else ()
    if format_ not in fitting:
        shown = ", ".join(fitting) or "none"
        raise ValueError(f"--format {format_}: the draft is a {config.model_type}; formats for it: {shown}")
    if format_ == Format.eagle and flavour is None:
        raise ValueError(f"--flavour: missing; no single `eagle` serves both engines: give one of {', '.join(Flavour)}")
    if format_ != Format.eagle and flavour is not None:
        raise ValueError(f"--flavour {flavour}: only the format `eagle` has flavours; {format_} has none")


def _check_rope(config: Any, facts: TargetFacts) -> None:
    for key in ("rope_theta", "mrope_section", "scaled_rope"):
        own, targets = getattr(config, key), getattr(facts, key)
        if own != targets:
            raise ValueError(f"draft.{key}: {own}, the target's is {targets}: engines give a draft the target's positions")
    if facts.scaled_rope and facts.mrope_section:
        raise ValueError(
            f"draft.scaled_rope: {facts.scaled_rope['rope_type']} with mrope_section {facts.mrope_section}: no format of the "
            f"engines' draft layers is known to hold both; the included decoder (sage-generate) reads this draft"
        )


def _check_family(facts: TargetFacts, allowed: Allowed) -> None:
    if facts.model_type in SERVED_FAMILIES:
        return
    what = f"no engine serves drafts for {facts.model_type} (vLLM 0.33 and SGLang 0.5.23 do not)"
    if not allowed.unserved:
        raise ValueError(
            f"target: {what}: the included decoder (sage-generate, sage.generate) is the only one that does; "
            f"--allow-unserved exports it all the same"
        )
    allowed.warnings.append(f"{what[0].upper()}{what[1:]}; the included decoder is its only home.")


def _check_levels(levels: list[int], facts: TargetFacts) -> None:
    rises = all(later > earlier for earlier, later in zip(levels, levels[1:], strict=False))
    if len(levels) != FEATURE_LEVELS or not rises or levels[0] < 0 or levels[-1] >= facts.num_layers:
        raise ValueError(
            f"draft.feature_levels: {list(levels)} cannot be served: engines fuse exactly {FEATURE_LEVELS} rising levels "
            f"among 0..{facts.num_layers - 1}; train with such ones"
        )


def _check_compressor(config: Any, allowed: Allowed) -> None:
    chosen = getattr(config, COMPRESSOR, None)
    if not chosen:
        return
    what = told_compressor(chosen)
    if not allowed.uncompressed:
        raise ValueError(
            f"draft.compressor: {what}: no engine has one, vLLM and SGLang show a draft every visual token, so this draft "
            f"would read sequences it was never trained on; train with draft/compressor=none, or export the rest of it with "
            f"--allow-uncompressed"
        )
    allowed.warnings.append(
        f"Trained with a visual compressor ({what}), which no engine has and which is left out here: engines show the draft "
        f"every visual token, which it never saw in training. Where figures follow, they were measured with it."
    )


def told_compressor(chosen: dict[str, Any]) -> str:
    """A config's compressor in words: `pool ratio=20`."""
    return " ".join([chosen["kind"], *(f"{key}={value}" for key, value in chosen.items() if key != "kind")])


def _check_other_fields(config: Any, format_: Format) -> None:
    """Any field an exporter does not know of, with a value other than its default, is something a format cannot say."""
    known = {*PreTrainedConfig().to_dict(), *KNOWN}
    default = type(config)().to_dict()
    for key, value in config.to_dict().items():
        if key in known or key.startswith("_") or value in (None, {}, [], default.get(key)):
            continue
        raise ValueError(f"draft.{key}: {value!r} cannot be expressed in the format {format_}; train without it")


KNOWN = (  # fields that the formats express, or that this module checks by name
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_theta", "mrope_section", "scaled_rope"),
    "initializer_range",
    *("image_inputs", "target", "target_path", "input_norm", "feature_levels", "draft_vocab_size", "norm_before_residual"),
    COMPRESSOR,
)


def _position_warnings(config: Any, facts: TargetFacts, format_: Format, flavour: Flavour | None) -> list[str]:
    """Where an engine shows the draft something else at picture positions than training did."""
    if facts.model_type not in SERVED_FAMILIES:
        return []
    of_flavour = ["vLLM" if flavour == Flavour.vllm else "SGLang"]
    engines = {Format.eagle3: ["vLLM", "SGLang"], Format.speculators: ["vLLM"]}.get(format_, of_flavour)
    sees = {"vLLM": "token", "SGLang": "embed"}
    what = {"token": "the placeholder token's embedding", "embed": "the visual embedding"}
    found = [
        f"At picture positions {engine} gives the draft {what[sees[engine]]}; it was trained with {what[config.image_inputs]}: "
        f"expect lower acceptance there (train with draft.image_inputs={sees[engine]} for it)."
        for engine in engines
        if sees[engine] != config.image_inputs
    ]
    if flavour == Flavour.sglang and facts.mrope_section:
        found.append(
            "SGLang's EAGLE-1/2 layer takes plain text positions, not M-RoPE: behind pictures they differ from training."
        )
    return found

"""Whether a format and the engines that load it can express a draft. What cannot be expressed is refused before any write.

All obstacles are named at once, by an export and by `checkpoints.export.serving`, whose line a run prints before training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from checkpoints.export.formats.layout import FEATURE_LEVELS, Flavour, Format, are_valid_levels
from checkpoints.export.target_facts import TargetFacts
from sage.drafts.registry import KINDS, head_kind

ENGINES = "vLLM 0.33 and SGLang 0.5.23"  # the versions that `Family.served_by` speaks of
ENGINE_FORMATS: dict[str, list[tuple[Format, Flavour | None]]] = {  # the formats that an engine loads, the preferred one first
    "vLLM": [(Format.eagle3, None), (Format.speculators, None), (Format.eagle, Flavour.vllm)],
    "SGLang": [(Format.eagle3, None), (Format.eagle, Flavour.sglang)],
}
FED_INPUTS = {"vLLM": "token", "SGLang": "embed"}  # engine -> the `draft.image_inputs` that it feeds
COMPRESSOR = "compressor"  # config field and module name of the visual compressor
EXPRESSED_FIELDS = (  # config fields that the formats contain or that this module checks
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_theta"),
    *("mrope_section", "mrope_interleaved", "scaled_rope", "initializer_range"),
    *("image_inputs", "target", "target_path", "input_norm", "feature_levels", "draft_vocab_size", "norm_before_residual"),
    COMPRESSOR,
)


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """A reason why an engine cannot serve a draft.

    Attributes:
        key: the setting in the way, or an option of sage-export.
        problem: why it is in the way.
        remedy: what to change.
        value: the key's value, where it has a short one.
        is_inherent: whether no option of sage-export gets around it.
    """

    key: str
    problem: str
    remedy: str
    value: str | None = None
    is_inherent: bool = True

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}; {self.remedy}"

    @property
    def brief(self) -> str:
        """The setting and the remedy, without the reason."""
        return f"{self.key}{'' if self.value is None else f'={self.value}'} ({self.remedy})"


class IncompatibleDraft(ValueError):
    """A draft that a format cannot express: all obstacles, one line each in `lines`."""

    def __init__(self, obstacles: Sequence[Obstacle]) -> None:
        self.lines = [str(obstacle) for obstacle in obstacles]
        super().__init__(" | ".join(self.lines))


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
        IncompatibleDraft: names every setting in the way, with its remedy.
    """
    found = find_obstacles(config, facts, format_, flavour)
    allowed = {"target": allow_unserved, f"draft.{COMPRESSOR}": allow_uncompressed}
    if refused := [obstacle for obstacle in found if obstacle.is_inherent or not allowed[obstacle.key]]:
        raise IncompatibleDraft(refused)
    warnings = []
    if problem := _family_problem(facts, _loading(format_, flavour)):
        others = (
            f"{' and '.join(facts.served_by)} and the included decoder do"
            if facts.served_by
            else "only the included decoder does"
        )
        warnings.append(f"{problem[0].upper()}{problem[1:]}; {others}.")
    if chosen := getattr(config, COMPRESSOR, None):
        warnings.append(
            f"Trained with a visual compressor ({format_compressor(chosen)}), which engines do not support and which is not "
            f"exported: engines feed the draft every visual token, which it was not trained on. Reported measurements were "
            f"made with the compressor."
        )
    return warnings + _position_warnings(config, facts, format_, flavour)


def engines_for(format_: Format, flavour: Flavour | None, facts: TargetFacts) -> list[str]:
    """Returns the engines that load a format and serve drafts for the target's family."""
    return [engine for engine in _loading(format_, flavour) if engine in facts.served_by]


def _loading(format_: Format, flavour: Flavour | None) -> list[str]:
    return [engine for engine, formats in ENGINE_FORMATS.items() if (format_, flavour) in formats]


def find_obstacles(
    config: Any, facts: TargetFacts, format_: Format, flavour: Flavour | None, engine: str | None = None
) -> list[Obstacle]:
    """Returns everything that prevents an export in this format, in the order in which it is to be solved.

    Args:
        engine: has to serve the export; None: one of those that load the format.
    """
    engines = _loading(format_, flavour) if engine is None else [engine]
    found = [
        *_format_obstacles(config, format_, flavour),
        *_target_obstacles(config, facts, engines),
        *_structure_obstacles(config, facts, format_),
        *_compressor_obstacles(config),
    ]
    return found or _other_obstacles(config, format_)


def _formats_of(config: Any) -> tuple[str, ...]:
    kind = head_kind(config.model_type)
    return kind.export_formats if kind else ()


def _format_obstacles(config: Any, format_: Format, flavour: Flavour | None) -> Iterator[Obstacle]:
    formats = _formats_of(config)
    if format_ not in formats:
        problem = f"the draft is a {config.model_type}; formats for it: {', '.join(formats) or 'none'}"
        yield Obstacle(key=f"--format {format_}", problem=problem, remedy=_format_remedy(format_, formats))
    if format_ == Format.eagle and flavour is None:
        remedy = f"give one of {', '.join(Flavour)}"
        yield Obstacle(key="--flavour", problem="missing; `eagle` differs between engines", remedy=remedy)
    if format_ != Format.eagle and flavour is not None:
        remedy = f"remove it; {format_} has none"
        yield Obstacle(key=f"--flavour {flavour}", problem="only the format `eagle` has flavours", remedy=remedy)


def _format_remedy(format_: Format, formats: Sequence[str]) -> str:
    trained = next((kind.name for kind in KINDS.values() if format_ in kind.export_formats), None)
    return " or ".join([*(["choose one of them"] if formats else []), *([f"train draft={trained}"] if trained else [])])


def _target_obstacles(config: Any, facts: TargetFacts, engines: Sequence[str]) -> Iterator[Obstacle]:
    if config.target != facts.fingerprint:
        problem = f"is {facts.fingerprint}, the draft was made for {config.target}"
        yield Obstacle(key=f"--target {facts.name}", problem=problem, remedy="give the target it was trained with")
    for key, targets in facts.rope.fields.items():
        own = getattr(config, key)
        if own != targets:
            problem = f"{own}, the target's is {targets}: engines give a draft the target's positions"
            yield Obstacle(key=f"draft.{key}", problem=problem, remedy="train it for this target")
    if facts.scaled_rope and facts.mrope_section:
        name = f"{facts.scaled_rope['rope_type']} with mrope_section {facts.mrope_section}"
        problem = f"{name}: engines are not known to support both in a draft"
        yield Obstacle(key="draft.scaled_rope", problem=problem, remedy="decode with sage-generate")
    if problem := _family_problem(facts, engines):
        others = "only " if not facts.served_by else f"{' and '.join(facts.served_by)}, "
        remedy = f"{others}sage-generate and sage.generate decode with it; --allow-unserved exports it anyway"
        yield Obstacle(key="target", value=facts.model_type, problem=problem, remedy=remedy, is_inherent=False)


def _family_problem(facts: TargetFacts, engines: Sequence[str]) -> str:
    """Returns why none of these engines serves the target's family; empty if one does, or if there is none to serve it."""
    if not facts.served_by:
        return f"no engine serves drafts for {facts.model_type} ({ENGINES} do not)"
    if not engines or {*engines} & {*facts.served_by}:
        return ""
    return f"{' and '.join(engines)} is not known to serve drafts for {facts.model_type}"


def _structure_obstacles(config: Any, facts: TargetFacts, format_: Format) -> Iterator[Obstacle]:
    formats = _formats_of(config)
    if Format.eagle in formats and config.input_norm:
        problem = (
            "true, but the engines' `eagle` layer has no input_layernorm, so its attention's input would differ from training"
        )
        remedy = "train with draft.input_norm=false, or train draft=eagle3"
        yield Obstacle(key="draft.input_norm", value="true", problem=problem, remedy=remedy)
    if format_ == Format.eagle3 and getattr(config, "norm_before_residual", False):
        remedy = "--format speculators serves it with vLLM"
        problem = "true, which SGLang does not support"
        yield Obstacle(key="draft.norm_before_residual", value="true", problem=problem, remedy=remedy)
    levels = config.feature_levels if Format.eagle3 in formats else None
    if levels is not None and not are_valid_levels(list(levels), facts.num_layers):
        problem = (
            f"{list(levels)} cannot be served: engines fuse exactly {FEATURE_LEVELS} increasing levels of "
            f"0..{facts.num_layers - 1}"
        )
        yield Obstacle(key="draft.feature_levels", value=str(list(levels)), problem=problem, remedy="train with such levels")


def _compressor_obstacles(config: Any) -> Iterator[Obstacle]:
    if chosen := getattr(config, COMPRESSOR, None):
        problem = (
            f"{format_compressor(chosen)}: no engine supports one: vLLM and SGLang feed a draft every visual token, which "
            f"this draft was not trained on"
        )
        remedy = "train with draft/compressor=none, or export the draft without it with --allow-uncompressed"
        value = format_compressor(chosen)
        yield Obstacle(key=f"draft.{COMPRESSOR}", value=value, problem=problem, remedy=remedy, is_inherent=False)


def format_compressor(chosen: dict[str, Any]) -> str:
    """Formats a compressor's configuration: `pool ratio=20`."""
    return " ".join([chosen["kind"], *(f"{key}={value}" for key, value in chosen.items() if key != "kind")])


def _other_obstacles(config: Any, format_: Format) -> list[Obstacle]:
    """Every field that no exporter writes, unless it has its default value."""
    known = {*PreTrainedConfig().to_dict(), *EXPRESSED_FIELDS}
    default = type(config)().to_dict()
    return [
        Obstacle(
            key=f"draft.{key}", problem=f"{value!r} cannot be expressed in the format {format_}", remedy="train without it"
        )
        for key, value in config.to_dict().items()
        if key not in known and not key.startswith("_") and value not in (None, {}, [], default.get(key))
    ]


def _position_warnings(config: Any, facts: TargetFacts, format_: Format, flavour: Flavour | None) -> list[str]:
    """Warns about engines whose draft inputs at image positions differ from training."""
    if not facts.has_images:
        return []
    engines = engines_for(format_, flavour, facts)
    names = {"token": "the placeholder token's embedding", "embed": "the visual embedding"}
    warnings = [
        f"At image positions {engine} feeds the draft {names[FED_INPUTS[engine]]}; "
        f"it was trained with {names[config.image_inputs]}: "
        f"expect lower acceptance there (train with draft.image_inputs={FED_INPUTS[engine]} for this engine)."
        for engine in engines
        if FED_INPUTS[engine] != config.image_inputs
    ]
    if "SGLang" in engines and format_ == Format.eagle and facts.mrope_section:
        warnings.append(
            "SGLang's EAGLE-1/2 layer uses plain text positions, not M-RoPE: after an image they differ from training."
        )
    return warnings

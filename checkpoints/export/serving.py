"""Whether a format and the engines that load it can express a draft. What cannot be expressed is refused before any write.

All obstacles are named at once: by an export, and by the line that a run prints before training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from checkpoints.export.formats import variants
from checkpoints.export.formats.base import ExportFormat, Obstacle
from checkpoints.export.registry import flavoured
from checkpoints.export.target import TargetFacts
from sage.drafts.registry import KINDS, head_kind

ENGINES = {"vLLM": "0.33", "SGLang": "0.5.23"}  # the versions that `Family.served_by` speaks of
OURS = "this decoder"
FED_INPUTS = {"vLLM": "token", "SGLang": "embed"}  # engine -> the `draft.image_inputs` that it feeds
COMPRESSOR = "compressor"  # config field and module name of the visual compressor
EXPRESSED_FIELDS = (  # config fields of all heads that the formats contain or that this module checks
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_theta"),
    *("mrope_section", "mrope_interleaved", "scaled_rope", "initializer_range"),
    *("image_inputs", "target", "target_path", "target_adapter", COMPRESSOR),
)


class IncompatibleDraft(ValueError):
    """A draft that a format cannot express: all obstacles, one line each in `lines`."""

    def __init__(self, obstacles: Sequence[Obstacle]) -> None:
        self.lines = [str(obstacle) for obstacle in obstacles]
        super().__init__(" | ".join(self.lines))


def check_compatible(config: Any, facts: TargetFacts, format_: ExportFormat, allowed: Mapping[str, bool]) -> list[str]:
    """Checks that the format, and the engines that load it, compute what the draft of this configuration computes.

    Args:
        allowed: key -> whether the user allows to export in spite of an obstacle that is not inherent.

    Returns:
        warnings for the model card about what differs from training, as complete sentences.

    Raises:
        IncompatibleDraft: names every setting in the way, with its remedy.
    """
    obstacles = find_obstacles(config, facts, format_)
    if refused := [obstacle for obstacle in obstacles if obstacle.is_inherent or not allowed[obstacle.key]]:
        raise IncompatibleDraft(refused)
    warnings = []
    if problem := _family_problem(facts, format_, format_.engines):
        served_by = " and ".join(format_.engine_label(engine, facts) for engine in format_.served_by(facts))
        others = f"{served_by} and the included decoder do" if served_by else "only the included decoder does"
        warnings.append(f"{problem[0].upper()}{problem[1:]}; {others}.")
    if chosen := getattr(config, COMPRESSOR, None):
        warnings.append(
            f"Trained with a visual compressor ({format_compressor(chosen)}), which engines do not support and which is not "
            f"exported: engines feed the draft every visual token, which it was not trained on. Reported measurements were "
            f"made with the compressor."
        )
    names = {"token": "the placeholder token's embedding", "embed": "the visual embedding"}
    warnings += [
        f"At image positions {engine} feeds the draft {names[fed]}; it was trained with {names[config.image_inputs]}: "
        f"expect lower acceptance there (train with draft.image_inputs={fed} for this engine)."
        for engine in engines_for(format_, facts)
        if (fed := _other_input(engine, config, facts))
    ]
    return [*warnings, *format_.warnings(config, facts)]


def engines_for(format_: ExportFormat, facts: TargetFacts) -> list[str]:
    """Returns the engines that load a format and serve drafts for the target's family."""
    return [engine for engine in format_.engines if engine in format_.served_by(facts)]


def find_obstacles(config: Any, facts: TargetFacts, format_: ExportFormat, engine: str | None = None) -> list[Obstacle]:
    """Returns everything that prevents an export in this format, in the order in which it is to be solved.

    `engine` has to serve the export; None: one of those that load the format.
    """
    kind = head_kind(config.model_type)
    names = kind.export_formats if kind else ()
    fitting = [format_] if format_.name in names else variants(names)[:1]
    found = [
        *_format_obstacles(f"draft={kind.name}" if kind else config.model_type, names, format_),
        *_target_obstacles(config, facts, format_, format_.engines if engine is None else [engine]),
        *(obstacle for fitting_format in fitting for obstacle in fitting_format.obstacles(config, facts)),
    ]
    if chosen := getattr(config, COMPRESSOR, None):
        value = format_compressor(chosen)
        problem = (
            f"{value}: no engine supports one: vLLM and SGLang feed a draft every visual token, which it was not trained on"
        )
        remedy = "train with draft/compressor=none, or export the draft without it with --allow-uncompressed"
        found.append(Obstacle(key=f"draft.{COMPRESSOR}", value=value, problem=problem, remedy=remedy, is_inherent=False))
    return found or _other_obstacles(config, format_)


def _format_obstacles(trained_with: str, formats: Sequence[str], format_: ExportFormat) -> Iterator[Obstacle]:
    name, flavour, flavours = format_.name, format_.flavour, format_.row.flavours
    if name not in formats:
        problem = f"the draft was trained with {trained_with}; its formats: {', '.join(formats) or 'none'}"
        remedies = ["choose one of them"] if formats else []
        remedies += [f"train draft={kind.name}" for kind in KINDS.values() if name in kind.export_formats][:1]
        yield Obstacle(key=f"--format {name}", problem=problem, remedy=" or ".join(remedies))
    if flavours and flavour not in format_.row.engines:
        key, state = ("--flavour", "missing") if flavour is None else (f"--flavour {flavour}", "unknown")
        remedy = f"give one of {', '.join(flavours)}{', or none' if None in format_.row.engines else ''}"
        yield Obstacle(key=key, problem=f"{state}; `{name}` differs between engines", remedy=remedy)
    if flavour is not None and not flavours:
        problem = f"the formats with flavours are {flavoured()}"
        yield Obstacle(key=f"--flavour {flavour}", problem=problem, remedy=f"remove it; {name} has none")


def _target_obstacles(config: Any, facts: TargetFacts, format_: ExportFormat, engines: Sequence[str]) -> Iterator[Obstacle]:
    if config.target != facts.fingerprint:
        problem = f"is {facts.fingerprint}, the draft was made for {config.target}"
        yield Obstacle(key=f"--target {facts.name}", problem=problem, remedy="give the target it was trained with")
    for key, served in format_.rope(facts).fields.items():
        own = getattr(config, key, None)
        if own != served:
            problem = f"{own}, the target's is {served}: engines give a draft the target's positions"
            yield Obstacle(key=f"draft.{key}", problem=problem, remedy="train it for this target")
    if facts.scaled_rope and facts.mrope_section:
        name = f"{facts.scaled_rope['rope_type']} with mrope_section {facts.mrope_section}"
        problem = f"{name}: engines are not known to support both in a draft"
        yield Obstacle(key="draft.scaled_rope", problem=problem, remedy="decode with sage-generate")
    if problem := _family_problem(facts, format_, engines):
        served_by = [format_.engine_label(engine, facts) for engine in format_.served_by(facts)]
        others = f"{' and '.join(served_by)}, " if served_by else "only "
        remedy = f"{others}sage-generate and sage.generate decode with it; --allow-unserved exports it anyway"
        yield Obstacle(key="target", value=facts.model_type, problem=problem, remedy=remedy, is_inherent=False)


def _family_problem(facts: TargetFacts, format_: ExportFormat, engines: Sequence[str]) -> str:
    """Returns why none of these engines serves the target's family; empty if one does, or if there is none to serve it."""
    served_by = format_.served_by(facts)
    if not served_by:
        versions = " and ".join(f"{engine} {version}" for engine, version in ENGINES.items())
        return f"no engine serves drafts for {facts.model_type} ({versions} do not)"
    if not engines or {*engines} & {*served_by}:
        return ""
    return f"{' and '.join(engines)} is not known to serve drafts for {facts.model_type}"


def format_compressor(chosen: dict[str, Any]) -> str:
    """Formats a compressor's configuration: `pool ratio=20`."""
    return " ".join([chosen["kind"], *(f"{key}={value}" for key, value in chosen.items() if key != "kind")])


def _other_obstacles(config: Any, format_: ExportFormat) -> list[Obstacle]:
    """Every field that no exporter writes, unless it has its default value."""
    known = {*PreTrainedConfig().to_dict(), *EXPRESSED_FIELDS, *format_.expressed}
    default = type(config)().to_dict()
    problem = f"cannot be expressed in the format {format_.name}"
    return [
        Obstacle(key=f"draft.{key}", problem=f"{value!r} {problem}", remedy="train without it")
        for key, value in config.to_dict().items()
        if key not in known and not key.startswith("_") and value not in (None, {}, [], default.get(key))
    ]


def _other_input(engine: str, config: Any, facts: TargetFacts) -> str:
    """Returns the `draft.image_inputs` that an engine feeds; empty if the draft was trained with it, or has no such inputs."""
    fed = FED_INPUTS.get(engine, "")
    return fed if facts.has_images and getattr(config, "image_inputs", None) not in (None, fed) else ""


# -- the line of a run -------------------------------------------------------------------------------------------------


def serving_line(draft: Any, target: Any) -> str:
    """Returns which engines can serve a draft once it is exported, and the settings in the way of the others.

    `target` is the configuration of the loaded target, `model.config`.
    """
    kind = head_kind(getattr(getattr(draft, "config", None), "model_type", None))
    if kind is None or not kind.export_formats:
        reason = f"draft={'model' if kind is None else kind.name} (it has no export; train draft=eagle3)"
        return f"can be served by {OURS} only; not by {' and '.join(ENGINES)}: {reason}"
    served: list[str] = []
    blocked: dict[str, list[str]] = {}
    config, facts = draft.config, _facts_of(draft, target)
    for engine in ENGINES:
        usable, obstacles = _usable(config, facts, kind.export_formats, engine)
        if usable:
            fed = _other_input(engine, config, facts)
            caveat = f"; lower acceptance at image positions than with draft.image_inputs={fed}" if fed else ""
            served.append(f"{usable.engine_label(engine, facts)} (sage-export --format {usable.choice}{caveat})")
        else:
            settings = [(each.key if each.value is None else f"{each.key}={each.value}", each.remedy) for each in obstacles]
            values = [f"{setting} ({remedy})" for setting, remedy in settings]
            blocked.setdefault("; ".join(values) or f"draft={kind.name} (it loads no format of it)", []).append(engine)
    line = f"can be served by {', '.join([*served, OURS])}{'' if served else ' only'}"
    return "; not by ".join([line, *(f"{' and '.join(engines)}: {reasons}" for reasons, engines in blocked.items())])


def export_choice(draft: Any, target: Any) -> str:
    """Returns the `--format` of `sage-export` for the first engine that serves a draft, as of `serving_line`; empty if none."""
    kind = head_kind(getattr(getattr(draft, "config", None), "model_type", None))
    if kind is None:
        return ""
    facts = _facts_of(draft, target)
    formats = (_usable(draft.config, facts, kind.export_formats, engine)[0] for engine in ENGINES)
    return next((format_.choice for format_ in formats if format_), "")


def _facts_of(draft: Any, target: Any) -> TargetFacts:
    return TargetFacts.of_config(target, draft.config.target_path).adapted(draft.config)


def _usable(
    config: Any, facts: TargetFacts, names: Sequence[str], engine: str
) -> tuple[ExportFormat | None, Sequence[Obstacle]]:
    """Returns the first format that an engine loads and that can express a draft; else the obstacles of the first it loads."""
    formats = [format_.for_draft(config) for format_ in variants(names) if engine in format_.engines]
    obstacles = [find_obstacles(config, facts, format_, engine) for format_ in formats]
    usable = next((format_ for format_, found in zip(formats, obstacles, strict=True) if not found), None)
    return usable, obstacles[0] if obstacles else ()

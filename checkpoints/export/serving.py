"""The line of a run about the engines that can serve its draft. Obstacles are found by `checkpoints.export.compatibility`."""

from __future__ import annotations

from typing import Any

from checkpoints.export.compatibility import ENGINE_FORMATS, FED_INPUTS, find_obstacles
from checkpoints.export.formats.layout import Flavour, Format
from checkpoints.export.target_facts import TargetFacts
from sage.drafts.registry import head_kind

OURS = "this decoder"


def serving_line(draft: Any, target: Any) -> str:
    """Returns which engines can serve a draft once it is exported, and the settings in the way of the others.

    Args:
        draft: the draft head, or the complete smaller model.
        target: the configuration of the loaded target, `model.config`.
    """
    config: Any = getattr(draft, "config", None)
    kind = head_kind(getattr(config, "model_type", None))
    if kind is None or not kind.export_formats:
        name = "model" if kind is None else kind.name
        return _line([], [f"{' and '.join(ENGINE_FORMATS)}: draft={name} (it has no export; train draft=eagle3)"])
    facts = TargetFacts.of_config(target, config.target_path)
    served: list[str] = []
    blocked: dict[str, list[str]] = {}
    for engine, formats in ENGINE_FORMATS.items():
        options = [(format_, flavour) for format_, flavour in formats if format_ in kind.export_formats]
        obstacles = {option: find_obstacles(config, facts, *option, engine) for option in options}
        if usable := [option for option in options if not obstacles[option]]:
            served.append(f"{engine} ({_command(*usable[0])}{_caveat(engine, config, facts)})")
        else:
            reasons = "; ".join(one.brief for one in obstacles[options[0]])
            blocked.setdefault(reasons, []).append(engine)
    return _line(served, [f"{' and '.join(engines)}: {reasons}" for reasons, engines in blocked.items()])


def _command(format_: Format, flavour: Flavour | None) -> str:
    return f"sage-export --format {format_}{f' --flavour {flavour}' if flavour else ''}"


def _caveat(engine: str, config: Any, facts: TargetFacts) -> str:
    fed = FED_INPUTS[engine]
    if fed == config.image_inputs or not facts.has_images:
        return ""
    return f"; it feeds draft.image_inputs={fed}: lower acceptance at image positions"


def _line(served: list[str], blocked: list[str]) -> str:
    line = f"can be served by {', '.join([*served, OURS])}{'' if served else ' only'}"
    return f"{line}; not by {'; not by '.join(blocked)}" if blocked else line

"""The line of a run about the engines that can serve its draft. Obstacles are found by `checkpoints.export.compatibility`."""

from __future__ import annotations

from typing import Any

from checkpoints.export.compatibility import ENGINES, FED_INPUTS, find_obstacles
from checkpoints.export.formats.registry import variants
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
        return _line([], [f"{' and '.join(ENGINES)}: draft={name} (it has no export; train draft=eagle3)"])
    facts = TargetFacts.of_config(target, config.target_path)
    served: list[str] = []
    blocked: dict[str, list[str]] = {}
    for engine in ENGINES:
        formats = [one for one in variants(kind.export_formats) if engine in one.engines]
        obstacles = [find_obstacles(config, facts, one, engine) for one in formats]
        if usable := [one for one, found in zip(formats, obstacles, strict=True) if not found]:
            served.append(f"{engine} (sage-export --format {usable[0].choice}{_caveat(engine, config, facts)})")
        else:
            none = f"draft={kind.name} (it loads no format of it)"
            reasons = "; ".join(one.brief for one in obstacles[0]) if obstacles else none
            blocked.setdefault(reasons, []).append(engine)
    return _line(served, [f"{' and '.join(engines)}: {reasons}" for reasons, engines in blocked.items()])


def _caveat(engine: str, config: Any, facts: TargetFacts) -> str:
    fed = FED_INPUTS[engine]
    if fed == config.image_inputs or not facts.has_images:
        return ""
    return f"; it feeds draft.image_inputs={fed}: lower acceptance at image positions"


def _line(served: list[str], blocked: list[str]) -> str:
    line = f"can be served by {', '.join([*served, OURS])}{'' if served else ' only'}"
    return f"{line}; not by {'; not by '.join(blocked)}" if blocked else line

"""Reads the tensors of a folder in an engine's format under the names of our drafts; what they cannot express is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from checkpoints.export.formats.layout import EngineConfig, TensorSpecs
from checkpoints.export.target_facts import EMBEDDING, TargetFacts
from checkpoints.export.weight_files import Weights
from sage.targets.rope import RopeConfig

PREFIXES = ("model.", "draft_model.", "module.")
IGNORED = (EMBEDDING, "verifier_lm_head.weight", "verifier_norm.weight")  # the target's own tensors
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Values that the folder of a third-party draft leaves open.

    Attributes:
        levels: feature levels, where the folder gives none or contradictory ones.
        image_inputs: draft inputs at image positions in training; None = as in sage_export.json, else `embed`.
        use_target_rope: use the target's rope even if the folder's config specifies another.
    """

    levels: tuple[int, ...] | None = None
    image_inputs: str | None = None
    use_target_rope: bool = False


def read_tensors(folder: Path, specs: TensorSpecs, own_name: Callable[[str], str], head: str) -> dict[str, Tensor]:
    """Reads the tensors under our names; those of the target and constants are left out.

    Args:
        specs: the expected tensors under the format's names.
        own_name: from a name in the format to ours.
        head: what the draft is called in messages.

    Raises:
        ValueError: names the tensors that are missing, unknown or misshapen.
    """
    weights = Weights(folder)
    specs = {own_name(name): spec for name, spec in specs.items()}
    names = {name: own_name(_without_prefixes(name)) for name in weights.infos}
    wanted = {theirs: ours for theirs, ours in names.items() if ours not in IGNORED and not ours.endswith(IGNORED_SUFFIXES)}
    missing = [name for name, spec in specs.items() if not spec.is_optional and name not in wanted.values()]
    unknown = sorted(theirs for theirs, ours in wanted.items() if ours not in specs)
    if missing:
        raise ValueError(f"{folder}: {', '.join(missing)}: missing; the draft is incomplete")
    if unknown:
        raise ValueError(f"{folder}: {', '.join(unknown)}: not part of our {head} head, cannot import this draft")
    tensors = {ours: weights[theirs] for theirs, ours in wanted.items()}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != specs[name].shape:
            raise ValueError(
                f"{folder}: {name} has shape {list(tensor.shape)}, {list(specs[name].shape)} according to config.json"
            )
    return {name: tensor for name, tensor in tensors.items() if not specs[name].is_zero}


def _without_prefixes(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def check_target_sizes(folder: Path, config: EngineConfig, facts: TargetFacts) -> None:
    """Raises ValueError for a draft whose hidden size or vocabulary is not the target's."""
    for key in ("hidden_size", "vocab_size"):
        if config.size(key) != getattr(facts, key):
            raise ValueError(
                f"{folder}: {config.key_path(key)} is {config.get(key)}, that of the target ({facts.name or facts.model_type}) "
                f"is {getattr(facts, key)}; give the target it was trained for"
            )


def read_rope(folder: Path, config: EngineConfig, facts: TargetFacts, options: ImportOptions) -> RopeConfig:
    """Returns the rope of a folder's config; ValueError unless it is the target's."""
    rope = config.rope
    if options.use_target_rope:
        return facts.rope
    if not rope.theta > 0:
        raise ValueError(f"{folder}: {config.key_path('rope_theta')} is not a positive number")
    if rope.scaled != facts.scaled_rope or rope.axes != facts.rope.axes:
        raise ValueError(
            f"{folder}: {config.key_path('rope_scaling')} is {rope.scaled or 'unscaled'} with mrope_section {rope.axes}, "
            f"the target's is {facts.scaled_rope or 'unscaled'} with {facts.rope.axes}: positions would differ from "
            f"training; --use-target-rope uses the target's"
        )
    return rope

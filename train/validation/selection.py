"""Selection of the draft and the settings that sage-validate measures.

Overrides on the command line come first; other settings come from the config.yaml of the run, and without a run the target from
the config.json of the draft. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from checkpoints.run_folder import CONFIG as RUN_CONFIG
from checkpoints.run_folder import run_of
from sage.drafts.location import find_draft, target_of
from train.config.resuming import read_plain, with_types
from train.config.schema import ConfigError, DataConfig, DecodeConfig, TargetConfig, ValidateConfig
from train.config.store import BY_PATH, key_of, target_dtype, target_name

Group = TypeVar("Group", TargetConfig, DataConfig, DecodeConfig)
RUNS = Path("runs")
CHOSEN = {"decode/policy": {"policies", "options"}, "data/validation": {"validation"}}  # fields set by a choice within a group


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The folder of a draft, and the run it belongs to, if any."""

    draft: Path
    run: Path | None

    @property
    def home(self) -> Path:
        """The folder that contains `checks/`: the run, or `runs/` for a draft without one, whose folder is only read."""
        return self.run or RUNS


def find_checkpoint(config: ValidateConfig) -> Checkpoint:
    """Finds the draft that `checkpoint` names (see `find_draft`). Raises ValueError if none is named, or there is none."""
    if config.checkpoint is None:
        raise ConfigError("checkpoint: missing; give checkpoint=RUN, or draft=DIR with target=NAME")
    draft = find_draft(config.checkpoint, "checkpoint")
    return Checkpoint(draft=draft, run=run_of(draft))


def settle(config: ValidateConfig, checkpoint: Checkpoint, overrides: Sequence[str]) -> ValidateConfig:
    """Returns the configuration with settings that are not overridden taken from the run, or from the draft itself. Raises
    ConfigError if the run's config.yaml cannot be used, ValueError without a target.
    """
    overrides = [override for override in overrides if override != BY_PATH]  # inserted by `expand`
    if checkpoint.run is not None:
        saved = read_plain(checkpoint.run, "give a complete run folder")
        groups = {"target": TargetConfig, "data": DataConfig, "decode": DecodeConfig}
        stored = {name: _group(saved, name, schema, checkpoint.run) for name, schema in groups.items()}
        return replace(config, **{name: overlay(getattr(config, name), stored[name], name, overrides) for name in groups})
    keys = {key_of(override) for override in overrides}
    if keys & {"target", "target.path"}:
        return config
    path = target_of(checkpoint.draft, "target=NAME or target.path=DIR")
    dtype = config.target.dtype if "target.dtype" in keys else target_dtype(path)
    return replace(config, target=replace(config.target, name=target_name(path), path=path, dtype=dtype))


def overlay(composed: Group, saved: Group, group: str, overrides: Sequence[str]) -> Group:
    """Returns `saved` with the overridden fields taken from `composed`.

    `group=NAME` overrides all fields; `decode/policy=NAMES` and `data/validation=NAMES` those set by such a choice.
    """
    keys = [key_of(override) for override in overrides]
    if group in keys:
        return composed
    chosen = {name for key in keys if key.startswith(f"{group}/") for name in CHOSEN[key]}
    named = {key.split(".")[1] for key in keys if key.startswith(f"{group}.")} - chosen
    changed = {name: getattr(composed, name) for name in chosen}
    changed |= {name: _merged(getattr(saved, name), getattr(composed, name)) for name in named}
    return replace(saved, **changed)


def _merged(saved: Any, composed: Any) -> Any:
    """Merges mappings (options of policies) key by key, so that options that are not overridden keep the run's values."""
    if not (isinstance(saved, dict) and isinstance(composed, dict)):
        return composed
    return saved | {key: _merged(saved.get(key), value) for key, value in composed.items()}


def _group(saved: dict[str, Any], name: str, schema: type[Group], run: Path) -> Group:
    """Returns one group of the run's configuration, typed; a field that this version does not have is an error."""
    if name not in saved:
        raise ConfigError(f"{run / RUN_CONFIG}: has no {name}; give a folder that sage-train made")
    known = {field.name for field in fields(schema)}
    if unknown := sorted(set(saved[name]) - known):
        raise ConfigError(f"{run / RUN_CONFIG}: {name}.{unknown[0]} is unknown to this version; give {name}=NAME instead")
    try:
        found = OmegaConf.to_object(with_types({name: saved[name]})[name])
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{run / RUN_CONFIG}: {name}: {reason}; give {name}=NAME, or a complete run folder") from error
    assert isinstance(found, schema)
    return found

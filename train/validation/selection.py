"""Selection of the draft and the settings that sage-validate measures.

Overrides on the command line come first; other settings come from the config.yaml of the run, and without a run the target from
the config.json of the draft. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from checkpoints.run_folder import CONFIG as RUN_CONFIG
from checkpoints.run_folder import run_of
from sage.drafts.location import find_draft, target_of
from train.config.resuming import read_plain, with_types
from train.config.schema import ConfigError, ValidateConfig
from train.config.store import BY_PATH, key_of, target_dtype, target_name

RUNS = Path("runs")
GROUPS = ("target", "data", "decode")  # settings of a run that its draft is measured with
SET_BY_CHOICE = {"decode/policy": ("decode.policies", "decode.options")}


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
    keys = [key_of(override) for override in overrides if override != BY_PATH and not override.startswith("~")]
    if checkpoint.run is not None:
        settled, given = _saved(checkpoint.run), OmegaConf.structured(config)
        for key in keys:
            for name in SET_BY_CHOICE.get(key, (key.replace("/", "."),)):
                if name.partition(".")[0] in GROUPS:  # a choice replaces; options of policies are merged
                    OmegaConf.update(settled, name, OmegaConf.select(given, name), merge="." in key, force_add=True)
        groups: dict[str, Any] = {name: OmegaConf.to_object(settled[name]) for name in GROUPS}
        return replace(config, **groups)
    if {"target", "target.path"} & {*keys}:
        return config
    path = target_of(checkpoint.draft, "target=NAME or target.path=DIR")
    dtype = config.target.dtype if "target.dtype" in keys else target_dtype(path)
    return replace(config, target=replace(config.target, name=target_name(path), path=path, dtype=dtype))


def _saved(run: Path) -> DictConfig:
    """Returns `GROUPS` of the run's configuration, typed; a field that this version does not have is an error."""
    plain, file = read_plain(run, "give a complete run folder"), run / RUN_CONFIG
    if missing := [name for name in GROUPS if name not in plain]:
        raise ConfigError(f"{file}: has no {missing[0]}; give a folder that sage-train made")
    try:
        return with_types({name: plain[name] for name in GROUPS})
    except (OmegaConfBaseException, KeyError) as error:
        key = str(getattr(error, "full_key", ""))
        reason = "is unknown to this version" if isinstance(error, ConfigKeyError) else str(error).splitlines()[0]
        remedy = f"give {key.partition('.')[0]}=NAME, or a complete run folder"
        raise ConfigError(f"{file}: {key}: {reason}; {remedy}") from error

"""Resuming a run, and measuring its draft, with its own configuration: what the command line overrides, and whether it may.

A resumed run may change its length, launch, saving, tracking and decoding; so may optim and objective, which is recorded with
the step. Seed, target, draft, data, score, batch and optim.kind would make it another run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from checkpoints.run_folder import CONFIG, RECIPE, dotted_keys, is_run, read_run_config
from sage.decoding.settings import AnswerSettings
from sage.drafts.location import target_of
from train.config.schema import Config, ConfigError, ValidateConfig
from train.config.store import BY_PATH, POLICY_GROUP, key_of, subschemas, target_dtype, target_name

# Prefixes of the keys that may not change when a run is resumed.
FIXED = (
    *("seed", "target.path", "target.revision", "target.adapter", "target.quantize", "target.dtype"),
    *("draft.", "data.", "score."),
    *("train.global_batch_size", "train.precision", "train.length_window", "optim.kind"),
    *("regenerate.on_cut", *(f"regenerate.{setting.name}" for setting in fields(AnswerSettings))),
)
CHANGEABLE = ("data.num_workers", "data.bad_list", "data.cache_keep")  # not data.cache: known lengths change the batches
UNRECORDED = ("run.", "debug", "launch.plan")  # settings of the command rather than of the run
# Choices that identify a run, by the key in which two of them differ: the run's own choice changes nothing else.
IDENTITIES = {"target": "target.path", "draft": "draft.kind", "draft/compressor": "draft.compressor.kind", "data": "data.name"}
MEASURED = ("target", "data", "decode")  # groups of a run's configuration that its draft is measured with


@dataclass(frozen=True)
class Change:
    """A setting that differs from the run's own configuration."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        recipe = " (training recipe)" if self.key.startswith(RECIPE) else ""  # it changes what is trained
        return f"{self.key}: {self.before} -> {self.now}{recipe}"


def with_own_config(composed: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Returns the configuration of the run in `run.dir`, with the `overrides` of the command line, composed, applied to it.

    ConfigError for a folder without a run, or whose configuration cannot be read or has keys that this version does not know.
    """
    folder = Path(composed.run.dir)
    if not is_run(folder):
        raise ConfigError(f"run.dir={folder}: no run to resume there ({CONFIG} is missing); give the folder of a run")
    config = _read_typed(folder)
    _apply(overrides, composed, config, IDENTITIES)
    config.run.dir, config.run.resume = str(folder), True
    config.debug = composed.debug
    return config


def with_run_of_draft(config: ValidateConfig, draft: Path, run: Path | None, overrides: Sequence[str]) -> ValidateConfig:
    """Returns the configuration with settings that are not overridden taken from the run of a draft, or from the draft itself.

    ConfigError if the run's configuration cannot be used, ValueError without a target.
    """
    if run is not None:
        own = _read_typed(run, MEASURED)
        _apply([word for word in overrides if not word.startswith("~")], OmegaConf.structured(config), own, {})
        groups: dict[str, Any] = {name: OmegaConf.to_object(own[name]) for name in MEASURED}
        return replace(config, **groups)
    keys = {key_of(override) for override in overrides if override != BY_PATH}
    if {"target", "target.path"} & keys:
        return config
    path = target_of(draft, "target=NAME or target.path=DIR")
    dtype = config.target.dtype if "target.dtype" in keys else target_dtype(path)
    return replace(config, target=replace(config.target, name=target_name(path), path=path, dtype=dtype))


def _apply(overrides: Sequence[str], composed: DictConfig, own: DictConfig, identities: Mapping[str, str]) -> None:
    """Takes what is overridden from the composed configuration: a choice replaces, options of policies are merged."""
    for override in overrides:
        key = key_of(override)
        own_key = identities.get(key, key.replace("/", "."))
        for name in ("decode.policies", "decode.options") if key == POLICY_GROUP else (own_key,):
            if override != BY_PATH and name.partition(".")[0] in own:  # `own` contains what experiment and sweep have set
                OmegaConf.update(own, name, OmegaConf.select(composed, name), merge="." in key, force_add=True)


def own_choices(given: Mapping[str, str]) -> list[str]:
    """Returns the run's choices of groups with typed choices, as overrides, if the given keys resume a run and lack them."""
    run = Path(given.get("run.dir", ""))
    if given.get("run.resume", "").lower() != "true" or not is_run(run):
        return []
    return [f"{group}={kind}" for group, kind in _kinds_of(read_run_config(run)).items() if group not in given]


def changes(config: Config) -> list[Change]:
    """Returns the settings of a resumed run that differ from those last used in its folder; none if it is not resumed.

    ConfigError if the run's configuration cannot be read.
    """
    folder = Path(config.run.dir)
    if not config.run.resume or not is_run(folder):
        return []
    before, now = _settings(_read_typed(folder)), _settings(OmegaConf.structured(config))
    keys = [key for key in sorted(before.keys() | now.keys()) if not key.startswith(UNRECORDED)]
    return [Change(key, before.get(key), now.get(key)) for key in keys if before.get(key) not in (now.get(key), MISSING)]


def check_same_run(config: Config) -> None:
    """Raises ConfigError with the first changed key if a run is resumed with other settings of the keys that identify it."""
    for change in changes(config):
        if change.key.startswith(FIXED) and not change.key.startswith(CHANGEABLE):
            raise ConfigError(
                f"{change.key}={change.now}: the run in {config.run.dir} was started with {change.before}; "
                f"resume without {change.key}, or start another run.dir"
            )


def _settings(config: DictConfig) -> dict[str, Any]:
    """Returns the dotted keys, without empty mappings, with the values that a YAML file has."""
    tree = OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(config)))
    return {key: value for key, value in dotted_keys(tree).items() if value != {}}


def _read_typed(run: Path, groups: Sequence[str] = ()) -> DictConfig:
    """The configuration that the run used last, or these groups of it, with the types of the schema.

    Keys that the run's version did not have get their defaults.
    """
    saved = read_run_config(run)
    try:
        return with_types({name: saved[name] for name in groups or saved})
    except (OmegaConfBaseException, KeyError) as error:
        line = " ".join(str(error).split("\n")[0].split())
        reason = f"{error.full_key}: {line}" if isinstance(error, OmegaConfBaseException) else f"no {line}"
        remedy = "give the folder of a run that it made"
        raise ConfigError(f"{run / CONFIG}: does not fit this version of sage-draft ({reason}); {remedy}") from error


def with_types(saved: Mapping[str, Any]) -> DictConfig:
    """Returns the saved values with the schema's types and defaults; OmegaConfBaseException or KeyError if they do not fit."""
    config = OmegaConf.structured(Config)
    for group, kind in _kinds_of(saved).items():
        OmegaConf.update(config, group.replace("/", "."), OmegaConf.structured(subschemas()[(group, kind)]), merge=False)
    merged = OmegaConf.merge(config, saved)
    assert isinstance(merged, DictConfig)
    return merged


def _kinds_of(saved: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chosen kinds of the groups whose choices have different keys."""
    values = dotted_keys(dict(saved))
    kinds = {group: values.get(f"{group.replace('/', '.')}.kind") for group, _ in subschemas()}
    return {group: str(kind) for group, kind in kinds.items() if kind}

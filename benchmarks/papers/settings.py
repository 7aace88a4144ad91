"""Typed settings of `make results`; the values are in full.yaml, shortened by quick.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from benchmarks.papers.figures import Json

FULL, QUICK = "full", "quick"


@dataclass(kw_only=True)
class RunSettings:
    """One training run: the short name of its target, and its arguments of sage-train; `extra` follows `overrides`.

    `is_alone`: the arguments are complete; those common to the other runs are left out.
    """

    target: str = MISSING
    is_alone: bool = False
    overrides: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class TrainingSettings:
    """`common` arguments precede those of each run, `last` follow them."""

    common: list[str] = MISSING
    last: list[str] = field(default_factory=list)
    runs: dict[str, RunSettings] = MISSING


@dataclass(kw_only=True)
class Settings:
    """All settings: what the studies share, and under `sizes` all other keys of full.yaml."""

    threads: int = MISSING
    runs_dir: str = MISSING
    docs_dir: str = MISSING
    targets: dict[str, str] = MISSING  # model folder or id by short name
    families: list[str] = MISSING
    max_new_tokens: int = MISSING
    passes: str = MISSING  # of our decoder, argument of `sage.load_target`
    training: TrainingSettings = field(default_factory=TrainingSettings)
    main_runs: dict[str, str] = MISSING  # by target, the run whose draft it is measured with
    assistant_runs: dict[str, str] = MISSING  # by target, the run of a smaller model of the same family
    sizes: dict[str, Any] = field(default_factory=dict)  # of each study, of `tuning` and of `costs`, by name


def load_settings(*names_or_paths: str | Path) -> Settings:
    """Returns full.yaml merged with each named file (`quick`, or a path).

    Raises:
        ValueError: an unknown key, or a value of the wrong type.
    """
    here = Path(__file__).parent
    files = [here / f"{one}.yaml" if one in (FULL, QUICK) else Path(one) for one in (FULL, *names_or_paths)]
    try:
        full, *changes = (cast(DictConfig, OmegaConf.load(file)) for file in files)
        merged = cast(DictConfig, OmegaConf.merge(full, *changes))
        known = {str(key): full[key] for key in full if key not in Settings.__annotations__}
        sizes = {name: merged.pop(name) for name in known}
        settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Settings), merged, {"sizes": sizes}))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"{files[-1]}: {str(error).splitlines()[0]}") from error
    assert isinstance(settings, Settings)
    for name, part in settings.sizes.items():
        _check_sizes(f"{files[-1]}: {name}", part, cast(Json, OmegaConf.to_container(known[name])))
    return settings


def _check_sizes(where: str, sizes: Json, known: Json) -> None:
    for key, value in sizes.items():
        if key not in known:
            raise ValueError(f"{where}.{key}: unknown; choose from {', '.join(known)}")
        if type(value) is not type(known[key]):
            raise ValueError(f"{where}.{key}: {value!r} is not of type {type(known[key]).__name__}")

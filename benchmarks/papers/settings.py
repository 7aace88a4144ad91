"""Typed settings of `make results`; the values are in full.yaml, shortened by quick.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

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
class TuningSettings:
    """`grids`: per policy, products of the listed values; all are replayed, the `timed` best of each policy are timed."""

    prompts: int = MISSING
    timed_prompts: int = MISSING
    timed_repeats: int = MISSING
    timed: int = MISSING
    static_sizes: list[int] = MISSING
    grids: dict[str, Any] = MISSING


@dataclass(kw_only=True)
class StudySettings:
    """Common to all studies: number of prompts per task family, test split."""

    prompts: int = MISSING
    families: list[str] = MISSING


@dataclass(kw_only=True)
class TimedSettings(StudySettings):
    repeats: int = MISSING


@dataclass(kw_only=True)
class EpochsSettings:
    """`runs`: runs with one validation after each epoch."""

    runs: list[str] = MISSING


@dataclass(kw_only=True)
class PruningSettings(TimedSettings):
    ratios: list[float] = MISSING


@dataclass(kw_only=True)
class CompressorSettings(TimedSettings):
    """`runs` are compared under each of `policies`; the first run is the uncompressed reference."""

    policies: list[str] = MISSING
    runs: list[str] = MISSING


@dataclass(kw_only=True)
class LengthSettings(TimedSettings):
    """`edges`: starts of the segments of free-running answers, in tokens."""

    lengths: list[int] = MISSING
    edges: list[int] = MISSING


@dataclass(kw_only=True)
class EntropySettings(StudySettings):
    """`candidates`: k of SAGE."""

    lags: int = MISSING
    candidates: int = MISSING


@dataclass(kw_only=True)
class CalibrationSettings(StudySettings):
    """`rounds`: decoding rounds of the validation split to calibrate on before errors are counted on the test split."""

    rounds: int = MISSING


@dataclass(kw_only=True)
class TemperatureSettings(TimedSettings):
    values: list[float] = MISSING


@dataclass(kw_only=True)
class CouplingSettings(TimedSettings):
    """`points`: temperature and top_p; `seeds`: number of seeds of each prompt."""

    points: list[list[float]] = MISSING
    seeds: int = MISSING


@dataclass(kw_only=True)
class ProjectionSettings(StudySettings):
    """`bandwidths`: memory bandwidth of the device of each shape, in GB/s; `policies` are replayed as published."""

    policies: list[str] = MISSING
    shapes: list[str] = MISSING
    bandwidths: dict[str, float] = MISSING
    contexts: list[int] = MISSING


@dataclass(kw_only=True)
class CostsSettings:
    """Costs of passes of a large shape on this machine; only `layers` of its text layers are built."""

    shape: str = MISSING
    layers: int = MISSING
    nodes: list[int] = MISSING
    widths: list[int] = MISSING
    contexts: list[int] = MISSING
    repeats: int = MISSING


@dataclass(kw_only=True)
class EnginesSettings:
    """`runs`: by target, the runs of the drafts by label, first the one that vLLM serves too; `depths`: num_speculative_tokens;
    `policies`: ours, as for `python -m sage.bench --policy`; `passes`: ours; `python`: interpreter of vLLM's environment.
    """

    python: str = MISSING
    runs: dict[str, dict[str, str]] = MISSING
    policies: list[str] = MISSING
    depths: list[int] = MISSING
    passes: str = MISSING
    prompts: int = MISSING
    repeats: int = MISSING


@dataclass(kw_only=True)
class Settings:
    """All settings."""

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
    tuning: TuningSettings = field(default_factory=TuningSettings)
    policies: TimedSettings = field(default_factory=TimedSettings)
    epochs: EpochsSettings = field(default_factory=EpochsSettings)
    pruning: PruningSettings = field(default_factory=PruningSettings)
    compressor: CompressorSettings = field(default_factory=CompressorSettings)
    length: LengthSettings = field(default_factory=LengthSettings)
    entropy: EntropySettings = field(default_factory=EntropySettings)
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    ablations: TimedSettings = field(default_factory=TimedSettings)
    temperature: TemperatureSettings = field(default_factory=TemperatureSettings)
    coupling: CouplingSettings = field(default_factory=CouplingSettings)
    projection: ProjectionSettings = field(default_factory=ProjectionSettings)
    costs: CostsSettings = field(default_factory=CostsSettings)
    engines: EnginesSettings = field(default_factory=EnginesSettings)


def load_settings(*names_or_paths: str | Path) -> Settings:
    """Returns full.yaml merged with each named file (`quick`, or a path).

    Raises:
        ValueError: an unknown key, or a value of the wrong type.
    """
    here = Path(__file__).parent
    files = [here / f"{one}.yaml" if one in (FULL, QUICK) else Path(one) for one in (FULL, *names_or_paths)]
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Settings), *(OmegaConf.load(file) for file in files))
        settings = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"{files[-1]}: {str(error).splitlines()[0]}") from error
    assert isinstance(settings, Settings)
    return settings

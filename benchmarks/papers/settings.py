"""What `make results` trains and measures, as typed settings: the numbers are in full.yaml, quick.yaml shortens them."""

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
    """One training run: its target by short name, and what sage-train is told; `extra` comes last."""

    target: str = MISSING
    overrides: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class TrainingSettings:
    """`common` overrides come before each run's own, `last` behind them."""

    common: list[str] = MISSING
    last: list[str] = field(default_factory=list)
    runs: dict[str, RunSettings] = MISSING


@dataclass(kw_only=True)
class TuningSettings:
    """Policies are tuned by replay over grids (products of the listed values); the `timed` best of each are then timed."""

    prompts: int = MISSING
    timed_prompts: int = MISSING
    timed_repeats: int = MISSING
    timed: int = MISSING
    static_sizes: list[int] = MISSING
    grids: dict[str, Any] = MISSING


@dataclass(kw_only=True)
class StudySettings:
    """What every study has: prompts of each family, from the test split."""

    prompts: int = MISSING
    families: list[str] = MISSING


@dataclass(kw_only=True)
class TimedSettings(StudySettings):
    repeats: int = MISSING


@dataclass(kw_only=True)
class EpochsSettings:
    """`runs` are those whose validations are read, one after each epoch."""

    runs: list[str] = MISSING


@dataclass(kw_only=True)
class PruningSettings(TimedSettings):
    ratios: list[float] = MISSING


@dataclass(kw_only=True)
class CompressorSettings(TimedSettings):
    """`runs` are compared under each of `policies`; the first run is what the others are held against."""

    policies: list[str] = MISSING
    runs: list[str] = MISSING


@dataclass(kw_only=True)
class LengthSettings(TimedSettings):
    """`edges`: where answers that end by themselves are cut into stretches, in tokens."""

    lengths: list[int] = MISSING
    edges: list[int] = MISSING


@dataclass(kw_only=True)
class EntropySettings(StudySettings):
    """`candidates` is SAGE's k."""

    lags: int = MISSING
    candidates: int = MISSING


@dataclass(kw_only=True)
class CalibrationSettings(StudySettings):
    """`rounds` are decoded on the validation split before errors are counted on the test split."""

    rounds: int = MISSING


@dataclass(kw_only=True)
class TemperatureSettings(TimedSettings):
    values: list[float] = MISSING


@dataclass(kw_only=True)
class ProjectionSettings(StudySettings):
    """`bandwidths`: gigabytes per second that the device of each shape reads; `policies` are replayed as published."""

    policies: list[str] = MISSING
    shapes: list[str] = MISSING
    bandwidths: dict[str, float] = MISSING
    contexts: list[int] = MISSING


@dataclass(kw_only=True)
class CostsSettings:
    """What passes of a large shape cost on this very machine; of its text layers only `layers` are built."""

    shape: str = MISSING
    layers: int = MISSING
    nodes: list[int] = MISSING
    widths: list[int] = MISSING
    contexts: list[int] = MISSING
    repeats: int = MISSING


@dataclass(kw_only=True)
class Settings:
    """Everything. `main` names the draft that each target is measured with, `assistants` a smaller model of its family."""

    threads: int = MISSING
    runs_dir: str = MISSING
    docs_dir: str = MISSING
    targets: dict[str, str] = MISSING
    families: list[str] = MISSING
    max_new_tokens: int = MISSING
    training: TrainingSettings = field(default_factory=TrainingSettings)
    main: dict[str, str] = MISSING
    assistants: dict[str, str] = MISSING
    tuning: TuningSettings = field(default_factory=TuningSettings)
    table: TimedSettings = field(default_factory=TimedSettings)
    epochs: EpochsSettings = field(default_factory=EpochsSettings)
    pruning: PruningSettings = field(default_factory=PruningSettings)
    compressor: CompressorSettings = field(default_factory=CompressorSettings)
    length: LengthSettings = field(default_factory=LengthSettings)
    entropy: EntropySettings = field(default_factory=EntropySettings)
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    ablations: TimedSettings = field(default_factory=TimedSettings)
    temperature: TemperatureSettings = field(default_factory=TemperatureSettings)
    projection: ProjectionSettings = field(default_factory=ProjectionSettings)
    costs: CostsSettings = field(default_factory=CostsSettings)


def load_settings(*names_or_paths: str | Path) -> Settings:
    """full.yaml, and on top of it each file named (`quick`, or a path).

    Raises:
        ValueError: a key that no setting has, or a value of another type.
    """
    here = Path(__file__).parent
    files = [here / f"{FULL}.yaml"]
    files += [here / f"{one}.yaml" if one in (FULL, QUICK) else Path(one) for one in names_or_paths]
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Settings), *(OmegaConf.load(file) for file in files))
        made = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"{files[-1]}: {str(error).splitlines()[0]}") from error
    assert isinstance(made, Settings)
    return made

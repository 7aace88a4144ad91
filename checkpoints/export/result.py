"""What an export is made of and what it results in: options, the draft and its origin, and the finished folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpoints.export.checks import CheckResult
from checkpoints.export.formats.base import ExportFormat
from checkpoints.export.target import TargetFacts
from sage.io.dtypes import dtype_name


@dataclass(kw_only=True)
class ExportOptions:
    """Options of an export."""

    flavour: str | None = None  # the engine, for a format that differs between engines
    dtype: torch.dtype = torch.bfloat16  # dtype of the weights
    target: str | None = None  # the target's folder or hub id; None = the one in the draft's config.json
    target_name: str | None = None  # the target's name in configs and commands; None = as it was loaded
    embedding: bool | None = None  # write the target's embedding too; None = the format's default
    overwrite: bool = False  # replace an existing export
    name: str | None = None  # the export's name in the card's commands; None = its folder
    report: str | None = None  # the report.json with the card's measurements, or its folder; None = the run's own
    # license, license_link: for the model card; None = not stated
    license: str | None = None
    license_link: str | None = None
    converter: str | None = None  # source folder of llama.cpp, whose converter the format `gguf` calls
    allow_unserved: bool = False  # export although no engine serves the target's family
    allow_uncompressed: bool = False  # export without the draft's visual compressor


class RoundingError(NamedTuple):
    """Effect of rounding to the export's dtype: largest difference of outputs, and their `ExportFormat.agreement`."""

    max_abs_difference: float
    agreement: float


@dataclass(frozen=True, kw_only=True)
class DraftSource:
    """A draft and its origin."""

    draft: Path  # folder of the trained draft
    run: Path | None = None  # the run that contains it, if any
    step: int | None = None  # optimizer steps it was trained for; None if unknown
    recipe: dict[str, Any] = field(default_factory=dict)  # the run's configuration when the draft was saved
    recipe_changes: list[str] = field(default_factory=list)  # earlier changes of the recipe, one line each
    provenance: dict[str, Any] = field(default_factory=dict)  # the run's provenance.json
    # the validation report of this draft: the run's own, unless `with_report` chose another
    report: dict[str, Any] | None = None


@dataclass(frozen=True)
class ExportResult:
    """A finished export."""

    folder: Path
    format: ExportFormat
    options: ExportOptions
    source: DraftSource
    facts: TargetFacts
    check: CheckResult  # the findings of `check_folder`
    rounding: RoundingError
    warnings: list[str]  # what differs from training, as complete sentences
    speculative_tokens: int  # drafted tokens per round in the card's commands

    @property
    def name(self) -> str:
        """The name in commands: the hub id it is uploaded to, or its folder."""
        return self.options.name or str(self.folder)

    @property
    def dtype(self) -> str:
        """Name of the dtype of the weights."""
        return dtype_name(self.options.dtype)

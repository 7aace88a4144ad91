"""An export: its options and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoints.export.formats.base import ExportFormat
from checkpoints.export.reload_check import RoundingError
from checkpoints.export.source import DraftSource
from checkpoints.export.target_facts import TargetFacts
from checkpoints.export.validator.findings import CheckResult
from sage.io.dtypes import dtype_name


@dataclass(kw_only=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        flavour: the engine, for a format that differs between engines.
        dtype: dtype of the weights.
        target: the target's folder or hub id; None = the one in the draft's config.json.
        target_name: the target's name in configs and commands; None = as it was loaded.
        embedding: write the target's embedding too; None = the format's default.
        overwrite: replace an existing export.
        name: the export's name in the card's commands; None = its folder.
        report: the report.json with the card's measurements, or its folder; None = the run's own.
        license, license_link: for the model card; None = not stated.
        allow_unserved: export although no engine serves the target's family.
        allow_uncompressed: export without the draft's visual compressor.
    """

    flavour: str | None = None
    dtype: torch.dtype = torch.bfloat16
    target: str | None = None
    target_name: str | None = None
    embedding: bool | None = None
    overwrite: bool = False
    name: str | None = None
    report: str | None = None
    license: str | None = None
    license_link: str | None = None
    allow_unserved: bool = False
    allow_uncompressed: bool = False


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """A finished export.

    Attributes:
        check: the validator's findings.
        warnings: what differs from training, as complete sentences.
    """

    folder: Path
    format: ExportFormat
    options: ExportOptions
    source: DraftSource
    facts: TargetFacts
    check: CheckResult
    rounding: RoundingError
    warnings: list[str]

    @property
    def name(self) -> str:
        """The name in commands: the hub id it is uploaded to, or its folder."""
        return self.options.name or str(self.folder)

    @property
    def dtype(self) -> str:
        """Name of the dtype of the weights."""
        return dtype_name(self.options.dtype)

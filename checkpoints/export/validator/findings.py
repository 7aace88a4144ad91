"""Findings of a check: the place, the value, and its effect in an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints.export.formats.layout import EngineConfig, TensorSpecs
from checkpoints.export.target_facts import TargetFacts
from checkpoints.export.weight_files import Weights

if TYPE_CHECKING:
    from checkpoints.export.formats.base import ExportFormat


@dataclass(frozen=True)
class Finding:
    """One error or warning: the tensor, config field or file, its value, and its effect in an engine."""

    where: str
    found: str
    effect: str
    is_warning: bool = False  # the draft can be served

    def __str__(self) -> str:
        return f"{self.where}: {self.found}; {self.effect}"


class InvalidExport(ValueError):
    """An engine would refuse the folder or serve it wrongly; the message lists the errors."""


@dataclass
class CheckInput:
    """The folder to check: its format, config, tensors, expected tensors (none if the config lacks sizes), target if known."""

    format: ExportFormat
    config: EngineConfig
    weights: Weights
    specs: TensorSpecs
    facts: TargetFacts | None

    def at(self, key: str, found: str, effect: str) -> Finding:
        """Returns a finding about a field of the decoder layer."""
        return Finding(self.config.key_path(key), found, effect)


@dataclass
class CheckResult:
    """The result of a check.

    Attributes:
        format: recognized by the config; None if it could not be read.
        notes: checks that were skipped, and why.
    """

    folder: Path
    format: ExportFormat | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """The findings that are not warnings."""
        return [finding for finding in self.findings if not finding.is_warning]

    @property
    def warnings(self) -> list[Finding]:
        """The findings that are warnings."""
        return [finding for finding in self.findings if finding.is_warning]

    def raise_if_invalid(self) -> None:
        """Raises InvalidExport with all errors, if there are any."""
        if self.errors:
            raise InvalidExport(f"{self.folder}: {'; also '.join(str(finding) for finding in self.errors)}")

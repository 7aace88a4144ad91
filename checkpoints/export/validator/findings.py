"""What a check has found: where, what, and what an engine would do with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints.export.facts import TargetFacts
from checkpoints.export.folder import TensorInfo, Weights
from checkpoints.export.formats.layout import Flavour, Format, Head, Table


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        where: the tensor, config field or file.
        found: what is there.
        effect: what an engine would do with it.
        is_warning: it works, but somebody should know.
    """

    where: str
    found: str
    effect: str
    is_warning: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.found}; {self.effect}"


class BadExport(ValueError):
    """A folder that an engine would refuse or, worse, serve wrongly; the message names the first finding."""


@dataclass
class Case:
    """A folder under examination: its config, its tensors' headers, and the target it is for, if known."""

    head: Head
    weights: Weights
    table: Table | None
    facts: TargetFacts | None

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Headers of all tensors."""
        return self.weights.infos


@dataclass
class Check:
    """The outcome of a check.

    Attributes:
        format, flavour: what the folder is; None where its config could not be read.
        notes: what could not be checked, and why.
    """

    folder: Path
    format: Format | None = None
    flavour: Flavour | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """The findings that are no mere warnings."""
        return [finding for finding in self.findings if not finding.is_warning]

    @property
    def warnings(self) -> list[Finding]:
        """The others."""
        return [finding for finding in self.findings if finding.is_warning]

    def raise_if_bad(self) -> None:
        """Raises BadExport with all errors, the first one first, if there are any."""
        if self.errors:
            raise BadExport(f"{self.folder}: {'; also '.join(str(finding) for finding in self.errors)}")

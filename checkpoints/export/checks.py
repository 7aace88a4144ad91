"""Checks a draft's folder against what serving engines expect. Every export passes before it is moved to its final name.

The checks are those of its format: checkpoints.export.format_checks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from checkpoints.export.configs import EngineConfig, as_list
from checkpoints.export.folder import CONFIG, Weights, export_info, verify_export
from checkpoints.export.formats.base import CheckInput, ExportFormat
from checkpoints.export.formats.records import Finding
from checkpoints.export.formats.registry import recognize, variants
from checkpoints.export.target import TargetFacts
from checkpoints.run_folder import CONFIG as RUN_CONFIG
from checkpoints.run_folder import is_run
from sage.drafts.location import EXPORT_INFO
from sage.io.manifest import MANIFEST, CorruptFolder, has_manifest
from sage.io.model_files import read_config

NOT_LOADABLE = "no engine can load it"
NOT_EXPORTED = "no engine loads it; export it first (sage-export DIR --format ...)"


class InvalidExport(ValueError):
    """An engine would refuse the folder or serve it wrongly; the message lists the errors."""


@dataclass
class CheckResult:
    """The result of a check."""

    folder: Path
    format: ExportFormat | None = None  # recognized by the config; None if it could not be read
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # checks that were skipped, and why

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


def check_folder(folder: Path, facts: TargetFacts | None = None) -> CheckResult:
    """Checks a draft in an engine's format, of this project or third-party; wrong content is a finding, not an error.

    Args:
        facts: facts about its target; None = those in sage_export.json, if there are any.

    Raises:
        ValueError: no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    result = CheckResult(folder)
    result.findings = _check_files(result, facts)
    return result


def _check_files(result: CheckResult, facts: TargetFacts | None) -> list[Finding]:
    """Reads config.json and the facts, in an order that names the first file at fault."""
    folder = result.folder
    if is_run(folder) and not (folder / CONFIG).is_file():
        return [Finding(RUN_CONFIG, "the folder of a run", NOT_EXPORTED)]
    try:
        if has_manifest(folder):
            verify_export(folder)
        config = EngineConfig(read_config(folder))
    except CorruptFolder as error:
        return [Finding(MANIFEST, str(error), "an engine would load the corrupt file")]
    except ValueError as error:
        return [Finding(CONFIG, str(error), NOT_LOADABLE)]
    try:
        if facts is None and (folder / EXPORT_INFO).is_file():
            facts = TargetFacts.from_dict(export_info(folder).get("target"))
    except ValueError as error:
        return [Finding(EXPORT_INFO, str(error), "the draft cannot be compared with its target")]
    return _check_content(result, config, facts)


def _check_content(result: CheckResult, config: EngineConfig, facts: TargetFacts | None) -> list[Finding]:
    if config.is_sage_draft:
        found = f"{config.raw['model_type']!r}, a draft in this package's own format"
        return [Finding("model_type", found, NOT_EXPORTED)]
    result.format = recognize(config)
    if result.format is None:
        known = ", ".join(one.engine_class for one in variants())
        found = f"{config.raw.get('architectures')}, model_type {config.raw.get('model_type')!r}; known drafts: {known}"
        return [Finding("architectures", found, f"{NOT_LOADABLE} as a draft")]
    try:
        weights = Weights(result.folder)
    except ValueError as error:
        return [Finding("weights", str(error), NOT_LOADABLE)]
    if facts is None:
        result.notes.append("vocabulary, context length, rope and layers were not compared with the target: give --target DIR")
    trained = as_list(export_info(result.folder).get("feature_levels"))
    given = CheckInput(result.format, config, weights, facts, result.folder, trained)
    return [finding for check in result.format.checks for finding in check(given)]

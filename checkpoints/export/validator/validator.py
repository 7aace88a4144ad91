"""Checks the folder of a draft. Every export passes this check before it is moved to its final name."""

from __future__ import annotations

from pathlib import Path

from checkpoints.export.export_folder import EXPORT_INFO, verify_export
from checkpoints.export.formats.layout import EngineConfig
from checkpoints.export.formats.registry import recognize, variants
from checkpoints.export.target_facts import TargetFacts
from checkpoints.export.validator.findings import CheckInput, CheckResult, Finding
from checkpoints.export.weight_files import CONFIG, Weights
from checkpoints.run_folder import CONFIG as RUN_CONFIG
from checkpoints.run_folder import is_run
from sage.io.files import read_json
from sage.io.manifest import MANIFEST, CorruptFolder, has_manifest
from sage.io.model_files import read_config

NOT_LOADABLE = "no engine can load it"
NOT_EXPORTED = "no engine loads it; export it first (sage-export DIR --format ...)"


def check_folder(folder: Path, facts: TargetFacts | None = None) -> CheckResult:
    """Checks a draft in an engine's format, of this project or third-party; wrong content is a finding, not an error.

    Args:
        facts: facts about its target; None = those in sage_export.json, if there are any.

    Raises:
        ValueError: no such folder.
    """
    result = CheckResult(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if is_run(folder) and not (folder / CONFIG).is_file():
        result.findings.append(Finding(RUN_CONFIG, "the folder of a run", NOT_EXPORTED))
        return result
    try:
        if has_manifest(folder):
            verify_export(folder)
        raw = read_config(folder)
    except CorruptFolder as error:
        result.findings.append(Finding(MANIFEST, str(error), "an engine would load the corrupt file"))
        return result
    except ValueError as error:
        result.findings.append(Finding(CONFIG, str(error), NOT_LOADABLE))
        return result
    try:
        facts = facts or _read_facts(folder)
    except ValueError as error:
        result.findings.append(Finding(EXPORT_INFO, str(error), "the draft cannot be compared with its target"))
        return result
    return _check_content(result, EngineConfig(raw), facts)


def _check_content(result: CheckResult, config: EngineConfig, facts: TargetFacts | None) -> CheckResult:
    if config.is_sage_draft:
        found = f"{config.raw['model_type']!r}, a draft in this package's own format"
        result.findings.append(Finding("model_type", found, NOT_EXPORTED))
        return result
    result.format = recognize(config)
    if result.format is None:
        known = ", ".join(one.engine_class for one in variants())
        found = f"{config.raw.get('architectures')}, model_type {config.raw.get('model_type')!r}; known drafts: {known}"
        result.findings.append(Finding("architectures", found, f"{NOT_LOADABLE} as a draft"))
        return result
    try:
        weights = Weights(result.folder)
    except ValueError as error:
        result.findings.append(Finding("weights", str(error), NOT_LOADABLE))
        return result
    given = CheckInput(result.format, config, weights, result.format.specs(config) or {}, facts)
    result.findings += [finding for check in result.format.checks for finding in check(given)]
    if facts is None:
        result.notes.append("vocabulary, context length, rope and layers were not compared with the target: give --target DIR")
    return result


def _read_facts(folder: Path) -> TargetFacts | None:
    """Reads the target's facts from sage_export.json, if the folder has one."""
    if not (folder / EXPORT_INFO).is_file():
        return None
    return TargetFacts.from_dict(read_json(folder / EXPORT_INFO).get("target"))

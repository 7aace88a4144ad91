"""Reads drafts in the formats of engines: checks folders, and imports third-party drafts (SpecForge, AngelSlim, SafeAILab, ..).

Every export is checked before it is moved to its final name. An imported draft computes exactly what was trained; what our head
cannot express is refused by name. An import ignores fields that only affect engines (class name, context length).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import sage
from checkpoints.export.configs import EngineConfig, as_list
from checkpoints.export.folder import CONFIG, Weights, export_info, new_export, verify_export
from checkpoints.export.formats import recognize, variants
from checkpoints.export.formats.base import CheckInput, ExportFormat, Finding, ImportOptions, Table
from checkpoints.export.registry import imported_drafts
from checkpoints.export.target import EMBEDDING, LM_HEAD, TargetFacts, read_table
from checkpoints.run_folder import CONFIG as RUN_CONFIG
from checkpoints.run_folder import is_run
from sage.drafts.head import FORM, DraftHead, check_target
from sage.drafts.location import EXPORT_INFO
from sage.io.files import write_json
from sage.io.manifest import MANIFEST, has_manifest
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

    `facts` are those of its target; None: those in sage_export.json, if there are any. ValueError without such a folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    result = CheckResult(folder)
    result.findings = [*_check(result, facts)]
    return result


def _check(result: CheckResult, facts: TargetFacts | None) -> Iterator[Finding]:
    """Reads the files, in an order that names the first one at fault, then asks the format."""
    folder = result.folder
    if is_run(folder) and not (folder / CONFIG).is_file():
        yield Finding(RUN_CONFIG, "the folder of a run", NOT_EXPORTED)
        return
    where, effect = MANIFEST, "an engine would load the corrupt file"
    try:
        if has_manifest(folder):
            verify_export(folder)
        where, effect = CONFIG, NOT_LOADABLE
        config = EngineConfig(read_config(folder))
        where, effect = EXPORT_INFO, "the draft cannot be compared with its target"
        info = export_info(folder)
        if facts is None and info:
            facts = TargetFacts.from_dict(info.get("target"))
        if config.is_sage_draft:
            yield Finding("model_type", f"{config.raw['model_type']!r}, a draft in this package's own format", NOT_EXPORTED)
            return
        result.format = recognize(config)
        if result.format is None:
            known = ", ".join(format_.engine_class for format_ in variants())
            found = f"{config.raw.get('architectures')}, model_type {config.raw.get('model_type')!r}; known drafts: {known}"
            yield Finding("architectures", found, f"{NOT_LOADABLE} as a draft")
            return
        where, effect = "weights", NOT_LOADABLE
        weights = Weights(folder)
    except ValueError as error:
        yield Finding(where, str(error), effect)
        return
    if facts is None:
        result.notes.append("vocabulary, context length, rope and layers were not compared with the target: give --target DIR")
    given = CheckInput(result.format, config, weights, facts, folder, as_list(info.get("feature_levels")))
    for check in result.format.checks:
        yield from check(given)


# -- import ------------------------------------------------------------------------------------------------------------


def convert(
    folder: Path | str, target: str, out: Path | str, options: ImportOptions | None = None, overwrite: bool = False
) -> Path:
    """Converts a third-party draft for a target, given by folder or hub id; writes it atomically to `out`, and returns that.

    ValueError names what cannot be imported, or that `out` exists.
    """
    folder, out = Path(folder), Path(out)
    facts = TargetFacts.of_folder(target)
    tables = {name: partial(read_table, facts, name) for name in (EMBEDDING, LM_HEAD)}
    draft = read_draft(folder, facts, options, tables if (Path(target) / CONFIG).is_file() else {})
    origin = export_info(folder)
    step = int(origin.get("step") or 0)
    with new_export(out, step, overwrite) as part:
        draft.save_pretrained(part)
        info = {
            "schema": 1,
            "imported_from": str(folder),
            "step": step,
            "steps_trained": origin.get("steps_trained"),
            "draft": draft.config.model_type,
            "parameters": draft.num_parameters(),
            "target": asdict(facts),
            "data_fingerprint": origin.get("data_fingerprint"),
            "validation": origin.get("validation"),
        }
        write_json(part / EXPORT_INFO, info)
    return out


def is_export(folder: Path) -> bool:
    """Whether the folder holds a draft in a format of an engine: an export, or a third-party draft."""
    return recognize(EngineConfig(read_config(folder))) is not None


def load_export(folder: Path, target: sage.Target) -> DraftHead:
    """Loads a draft in an engine's format on the target's device, in its dtype; ValueError if it is not for this target."""
    modules = {} if target.is_meta else {EMBEDDING: target.embed_tokens, LM_HEAD: target.lm_head}
    tables = {name: partial(module.weight.detach().to, "cpu") for name, module in modules.items()}
    facts = TargetFacts.of_config(target.model.config, target.name)
    stored = export_info(folder).get("target") or {}
    changes: dict[str, Any] = {key: stored.get(key) for key in ("adapter", "adapter_path", "quantize")}
    facts = replace(facts, **changes)
    check_target(facts.fingerprint, target, folder, FORM)
    draft = read_draft(folder, facts, tables=tables)
    draft.config.name_or_path = str(folder)
    draft.to(device=target.device, dtype=target.dtype)
    if not target.is_meta:
        draft.borrow(target)
    return draft


def read_draft(
    folder: Path, facts: TargetFacts, options: ImportOptions | None = None, tables: Mapping[str, Table] | None = None
) -> DraftHead:
    """Reads a third-party draft as a draft of this package, in the dtype of its file; pickles of tensors only are read, too.

    `tables` are the target's, to compare with those of the folder. ValueError names what is wrong, or cannot be expressed.
    """
    config = EngineConfig(read_config(folder))
    if config.is_sage_draft:
        raise ValueError(f"{folder}: already a draft of this package; sage-validate and sage-generate load it as it is")
    format_ = recognize(config)
    if format_ is None or not format_.row.imports:
        found = config.raw.get("architectures") or config.raw.get("model_type")
        raise ValueError(f"{folder / CONFIG}: {found} is not an {imported_drafts()} draft; only those can be imported")
    return format_.read(folder, facts, options or ImportOptions(), tables or {})

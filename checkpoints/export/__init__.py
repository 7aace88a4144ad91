"""Drafts for serving engines: exported, checked, described, and imported.

`export` writes a trained draft in one of three formats, `check_folder` checks the folder of any draft, `convert` imports a
third-party EAGLE-3 draft. The command is `sage-export`. Names are loaded on first use, so that `--help` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints.export.exporter import ExportOptions, ExportResult, export
    from checkpoints.export.formats.layout import Flavour, Format
    from checkpoints.export.importer import ImportOptions, convert, load_any, read_eagle3
    from checkpoints.export.target_facts import TargetFacts
    from checkpoints.export.validator.findings import CheckResult, Finding, InvalidExport
    from checkpoints.export.validator.validator import check_folder

_MODULES = {
    "exporter": ("ExportOptions", "ExportResult", "export"),
    "formats.layout": ("Flavour", "Format"),
    "importer": ("ImportOptions", "convert", "load_any", "read_eagle3"),
    "target_facts": ("TargetFacts",),
    "validator.findings": ("CheckResult", "Finding", "InvalidExport"),
    "validator.validator": ("check_folder",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'checkpoints.export' has no attribute {name!r}")
    return getattr(import_module(f"checkpoints.export.{_HOME[name]}"), name)


__all__ = [
    "CheckResult",
    "ExportOptions",
    "ExportResult",
    "Finding",
    "Flavour",
    "Format",
    "ImportOptions",
    "InvalidExport",
    "TargetFacts",
    "check_folder",
    "convert",
    "export",
    "load_any",
    "read_eagle3",
]

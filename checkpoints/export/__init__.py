"""Drafts for the engines people serve with: written, checked, described, and read back in.

`export` writes a trained draft in one of three formats, `check_folder` examines any draft's folder, `convert` turns an EAGLE-3
draft made elsewhere into one of ours. The command is `sage-export`. Names are loaded on first use, so that its --help is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints.export.converting import convert, load_any
    from checkpoints.export.exporting import Exported, Options, export
    from checkpoints.export.expressible import Allowed
    from checkpoints.export.facts import TargetFacts
    from checkpoints.export.formats.layout import Flavour, Format
    from checkpoints.export.importing import Reading, read_eagle3
    from checkpoints.export.validator.findings import BadExport, Check, Finding
    from checkpoints.export.validator.validator import check_folder

_HOME = {
    "Allowed": "expressible",
    "BadExport": "validator.findings",
    "Check": "validator.findings",
    "Exported": "exporting",
    "Finding": "validator.findings",
    "Flavour": "formats.layout",
    "Format": "formats.layout",
    "Options": "exporting",
    "Reading": "importing",
    "TargetFacts": "facts",
    "check_folder": "validator.validator",
    "convert": "converting",
    "export": "exporting",
    "load_any": "converting",
    "read_eagle3": "importing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'checkpoints.export' has no attribute {name!r}")
    return getattr(import_module(f"checkpoints.export.{_HOME[name]}"), name)


__all__ = [
    "Allowed",
    "BadExport",
    "Check",
    "Exported",
    "Finding",
    "Flavour",
    "Format",
    "Options",
    "Reading",
    "TargetFacts",
    "check_folder",
    "convert",
    "export",
    "load_any",
    "read_eagle3",
]

"""The export formats as objects, found by name or recognized in a folder."""

from __future__ import annotations

from collections.abc import Iterable
from pkgutil import resolve_name

from checkpoints.export.configs import EngineConfig
from checkpoints.export.formats.base import ExportFormat
from checkpoints.export.registry import FORMATS, check_format


def find_format(name: str, flavour: str | None = None) -> ExportFormat:
    """Returns a format by name; ValueError for an unknown name. An unknown flavour is an obstacle of every export."""
    check_format(name)
    format_: ExportFormat = resolve_name(FORMATS[name].home)(FORMATS[name], flavour)
    return format_


def variants(names: Iterable[str] | None = None) -> list[ExportFormat]:
    """Returns the formats, or those with the given names, in each of their flavours; the preferred one comes first."""
    rows = [row for row in FORMATS.values() if names is None or row.name in names]
    return [find_format(row.name, flavour) for row in rows for flavour in row.engines]


def recognize(config: EngineConfig) -> ExportFormat | None:
    """Returns the format of a config.json, in its flavour; None if no engine would load it as a draft.

    The rows are asked from the last to the first: the first ones also take third-party drafts that name no class of their own.
    """
    if config.is_sage_draft:
        return None
    formats = (find_format(row.name, flavour) for row in reversed(FORMATS.values()) for flavour in row.engines)
    return next((format_ for format_ in formats if format_.recognizes(config)), None)

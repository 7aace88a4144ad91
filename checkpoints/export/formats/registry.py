"""The export formats, one row each: the only place that lists them.

Everything else asks the rows and the objects that they name. Classes are named "module:Class" and imported on demand, so that a
command line can list the formats without importing torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from checkpoints.export.formats.records import FormatRow
from sage.io.ranges import did_you_mean

if TYPE_CHECKING:
    from checkpoints.export.configs import EngineConfig
    from checkpoints.export.formats.base import ExportFormat


HOME = "checkpoints.export.formats"
ROWS = (
    FormatRow("eagle3", f"{HOME}.eagle3:Eagle3Format", {None: ("vLLM", "SGLang")}, imports="EAGLE-3"),
    FormatRow("speculators", f"{HOME}.speculators:SpeculatorsFormat", {None: ("vLLM",)}, imports="EAGLE-3"),
    FormatRow("eagle", f"{HOME}.eagle:EagleFormat", {"vllm": ("vLLM",), "sglang": ("SGLang",), "plugin": ("vLLM",)}),
    FormatRow("peagle", f"{HOME}.peagle:PEagleFormat", {None: ("vLLM",)}, imports="P-EAGLE"),
    FormatRow("dflash", f"{HOME}.block:DFlashFormat", {None: ("vLLM",), "native": ("vLLM", "SGLang")}, imports="DFlash"),
    FormatRow("dspark", f"{HOME}.block:DSparkFormat", {None: ("vLLM",)}, imports="DSpark"),
    FormatRow("gguf", f"{HOME}.gguf:GgufFormat", {None: ("llama.cpp",)}, needs_converter=True, imports="EAGLE-3"),
)
FORMATS = {row.name: row for row in ROWS}


def load_format(row: FormatRow, flavour: str | None = None) -> ExportFormat:
    """Imports the format of a row. A flavour that it does not have is an obstacle of every export (`find_obstacles`)."""
    loaded: ExportFormat = resolve_name(row.home)(row, flavour)
    return loaded


def check_format(name: str) -> None:
    """Raises ValueError for an unknown format, with the known ones; imports none of them."""
    if name not in FORMATS:
        raise ValueError(f"--format {name}: unknown{did_you_mean(name, [*FORMATS])}; choose one of {', '.join(FORMATS)}")


def find_format(name: str, flavour: str | None = None) -> ExportFormat:
    """Returns a format by name. Raises ValueError for an unknown name."""
    check_format(name)
    return load_format(FORMATS[name], flavour)


def variants(names: Iterable[str] | None = None) -> list[ExportFormat]:
    """Returns the formats, or those with the given names, in each of their flavours; the preferred one comes first."""
    rows = [row for row in FORMATS.values() if names is None or row.name in names]
    return [load_format(row, flavour) for row in rows for flavour in row.engines]


def recognize(config: EngineConfig) -> ExportFormat | None:
    """Returns the format of a config.json, in its flavour; None if no engine would load it as a draft.

    The rows are asked from the last to the first: the first ones also take third-party drafts that name no class of their own.
    """
    if config.is_sage_draft:
        return None
    formats = (load_format(row, flavour) for row in reversed(FORMATS.values()) for flavour in row.engines)
    return next((one for one in formats if one.recognizes(config)), None)


def imported_drafts() -> str:
    """Returns the drafts that `--import` reads, for messages and help."""
    *first, last = dict.fromkeys(row.imports for row in FORMATS.values() if row.imports)
    return f"{', '.join(first)} or {last}" if first else last


def flavoured() -> str:
    """Returns the formats that have flavours, for messages and help: `eagle`."""
    return ", ".join(f"`{row.name}`" for row in FORMATS.values() if row.flavours)

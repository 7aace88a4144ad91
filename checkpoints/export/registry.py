"""The export formats, one row each: the only place that lists them.

Everything else asks the rows and the objects that they name (`checkpoints.export.formats`). Classes are named "module:Class"
and imported on demand, so that a command line can list the formats without importing torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sage.io.ranges import did_you_mean


@dataclass(frozen=True)
class FormatRow:
    """A row of the registry."""

    name: str  # the choice `--format NAME`, and an entry of `DraftKind.export_formats`
    home: str  # "module:Class" of its `ExportFormat`
    # flavour -> engines that load it. None: without `--flavour`, of which some formats have no other
    engines: Mapping[str | None, tuple[str, ...]]
    needs_converter: bool = False  # whether `--converter DIR` has to name a tool that writes it
    imports: str = ""  # drafts that `--import` reads in this format, as messages call them; empty: none

    @property
    def flavours(self) -> tuple[str, ...]:
        """The choices of `--flavour`; empty if the format has none."""
        return tuple(flavour for flavour in self.engines if flavour is not None)

    @property
    def summary(self) -> str:
        """The name, and what loads the format, for help."""
        parts = [" and ".join(self.engines.get(None, ())), "with --flavour" if self.flavours else ""]
        return f"{self.name} ({'; '.join(part for part in parts if part)})"


HOME = "checkpoints.export.formats"
ROWS = (
    FormatRow("eagle3", f"{HOME}.eagle:Eagle3Format", {None: ("vLLM", "SGLang")}, imports="EAGLE-3"),
    FormatRow("speculators", f"{HOME}.eagle:SpeculatorsFormat", {None: ("vLLM",)}, imports="EAGLE-3"),
    FormatRow("eagle", f"{HOME}.eagle:EagleFormat", {"vllm": ("vLLM",), "sglang": ("SGLang",), "plugin": ("vLLM",)}),
    FormatRow("peagle", f"{HOME}.peagle:PEagleFormat", {None: ("vLLM",)}, imports="P-EAGLE"),
    FormatRow("dflash", f"{HOME}.block:DFlashFormat", {None: ("vLLM",), "native": ("vLLM", "SGLang")}, imports="DFlash"),
    FormatRow("dspark", f"{HOME}.block:DSparkFormat", {None: ("vLLM",)}, imports="DSpark"),
    FormatRow("gguf", f"{HOME}.gguf:GgufFormat", {None: ("llama.cpp",)}, needs_converter=True, imports="EAGLE-3"),
)
FORMATS = {row.name: row for row in ROWS}


def check_format(name: str) -> None:
    """Raises ValueError for an unknown format, with the known ones."""
    if name not in FORMATS:
        raise ValueError(f"--format {name}: unknown{did_you_mean(name, [*FORMATS])}; choose one of {', '.join(FORMATS)}")


def imported_drafts() -> str:
    """Returns the drafts that `--import` reads, for messages and help."""
    *first, last = dict.fromkeys(row.imports for row in FORMATS.values() if row.imports)
    return f"{', '.join(first)} or {last}"


def flavoured() -> str:
    """Returns the formats that have flavours, for messages and help: `eagle`."""
    return ", ".join(f"`{row.name}`" for row in FORMATS.values() if row.flavours)

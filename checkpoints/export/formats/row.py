"""A row of the registry of formats: what a command line shows of a format without importing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FormatRow:
    """A row of the registry.

    Attributes:
        name: the choice `--format NAME`, and an entry of `DraftKind.export_formats`.
        home: "module:Class" of its `ExportFormat`.
        engines: flavour -> engines that load it. None: without `--flavour`, of which some formats have no other.
        imports: drafts that `--import` reads in this format, as messages call them; empty: none.
    """

    name: str
    home: str
    engines: Mapping[str | None, tuple[str, ...]]
    imports: str = ""

    @property
    def flavours(self) -> tuple[str, ...]:
        """The choices of `--flavour`; empty if the format has none."""
        return tuple(flavour for flavour in self.engines if flavour is not None)

    @property
    def summary(self) -> str:
        """The name, and what loads the format, for help."""
        parts = [" and ".join(self.engines.get(None, ())), "with --flavour" if self.flavours else ""]
        return f"{self.name} ({'; '.join(part for part in parts if part)})"

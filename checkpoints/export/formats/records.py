"""Records of formats, without torch: the row of the registry, what a format says about a folder or a draft, import options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One error or warning: the tensor, config field or file, its value, and its effect in an engine."""

    where: str
    found: str
    effect: str
    is_warning: bool = False  # the draft can be served
    refusal: str = ""  # what to do about it in an import; empty if only engines are affected

    def __str__(self) -> str:
        return f"{self.where}: {self.found}; {self.effect}"


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """A reason why an engine cannot serve a draft."""

    key: str  # the setting in the way, or an option of sage-export
    problem: str  # why it is in the way
    remedy: str  # what to change
    value: str | None = None  # the key's value, where it has a short one
    is_inherent: bool = True  # whether no option of sage-export gets around it

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}; {self.remedy}"

    @property
    def brief(self) -> str:
        """The setting and the remedy, without the reason."""
        return f"{self.key}{'' if self.value is None else f'={self.value}'} ({self.remedy})"


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Values that the folder of a third-party draft leaves open."""

    levels: tuple[int, ...] | None = None  # feature levels, where the folder gives none or contradictory ones
    # draft inputs at image positions in training; None = as in sage_export.json, else `embed`
    image_inputs: str | None = None
    use_target_rope: bool = False  # use the target's rope even if the folder's config specifies another


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

"""What a format says about a folder or a draft, and what an import is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One error or warning: the tensor, config field or file, its value, and its effect in an engine.

    Attributes:
        is_warning: the draft can be served.
        refusal: what to do about it in an import; empty if only engines are affected.
    """

    where: str
    found: str
    effect: str
    is_warning: bool = False
    refusal: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.found}; {self.effect}"


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """A reason why an engine cannot serve a draft.

    Attributes:
        key: the setting in the way, or an option of sage-export.
        problem: why it is in the way.
        remedy: what to change.
        value: the key's value, where it has a short one.
        is_inherent: whether no option of sage-export gets around it.
    """

    key: str
    problem: str
    remedy: str
    value: str | None = None
    is_inherent: bool = True

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}; {self.remedy}"

    @property
    def brief(self) -> str:
        """The setting and the remedy, without the reason."""
        return f"{self.key}{'' if self.value is None else f'={self.value}'} ({self.remedy})"


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Values that the folder of a third-party draft leaves open.

    Attributes:
        levels: feature levels, where the folder gives none or contradictory ones.
        image_inputs: draft inputs at image positions in training; None = as in sage_export.json, else `embed`.
        use_target_rope: use the target's rope even if the folder's config specifies another.
    """

    levels: tuple[int, ...] | None = None
    image_inputs: str | None = None
    use_target_rope: bool = False

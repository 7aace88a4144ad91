"""The rope of a target's text layers, which draft heads and exports follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

SCALED_TYPES = ("linear", "llama3", "yarn")  # their frequencies do not depend on the sequence length
# Keys of rope_parameters besides a scaled rope's.
NOT_SCALING = ("rope_theta", "mrope_section", "mrope_interleaved", "partial_rotary_factor", "type")


class RopeConfig(NamedTuple):
    """Rotary position embeddings.

    Attributes:
        theta: base of the frequencies.
        section: number of frequencies per axis (temporal, height, width) of M-RoPE; None = one axis. Of a target that rotates
            a part of its heads, multiplied: draft heads rotate all of theirs.
        scaled: `rope_type` and parameters of a scaled rope; None = unscaled.
        interleaved: whether the axes of M-RoPE alternate from frequency to frequency instead of following one another.
    """

    theta: float
    section: list[int] | None = None
    scaled: dict[str, Any] | None = None
    interleaved: bool = False

    @staticmethod
    def of(rope: Mapping[str, Any]) -> RopeConfig:
        """Reads the `rope_parameters` of a text model; ValueError for a rope that draft heads cannot follow."""
        if "rope_theta" not in rope:
            raise ValueError("target.rope_parameters: no single rope_theta; draft heads follow one rope for all layers")
        multiple = 1 / rope.get("partial_rotary_factor", 1.0)
        if not multiple.is_integer():
            raise ValueError(
                f"target.rope_parameters.partial_rotary_factor: {1 / multiple:g}; allowed: 1 / n, as 0.25; train draft=model"
            )
        rope_type = rope.get("rope_type", "default")
        if rope_type != "default":
            check_rope_type(rope_type)
        scaled = {key: value for key, value in rope.items() if key not in NOT_SCALING}
        section = rope.get("mrope_section")
        return RopeConfig(
            float(rope["rope_theta"]),
            section and [size * int(multiple) for size in section],
            None if rope_type == "default" else scaled,
            section is not None and bool(rope.get("mrope_interleaved", False)),
        )

    @property
    def axes(self) -> str | None:
        """The section as in messages: `[24, 20, 20] (interleaved)`."""
        return f"{self.section}{' (interleaved)' if self.interleaved else ''}" if self.section else None

    @property
    def fields(self) -> dict[str, Any]:
        """The same values under the names of a draft's configuration."""
        return {
            "rope_theta": self.theta,
            "mrope_section": self.section,
            "mrope_interleaved": self.interleaved,
            "scaled_rope": self.scaled,
        }


def check_rope_type(rope_type: Any) -> None:
    """Raises ValueError if the frequencies of a scaled rope are unknown, or depend on the sequence length."""
    if rope_type not in SCALED_TYPES:
        raise ValueError(
            f"target.rope_parameters.rope_type: {rope_type!r}; allowed: default, {', '.join(SCALED_TYPES)}, whose frequencies "
            f"do not depend on the sequence length; train draft=model for this target"
        )

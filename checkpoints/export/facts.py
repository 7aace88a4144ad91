"""What a draft and its engine must agree with the target about, read from the target's folder or remembered by the draft."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
}


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """The part of a target's config that reaches into a draft's.

    Attributes:
        mrope_section: frequencies per axis (temporal, height, width); None = one axis.
        scaled_rope: `rope_type` and parameters of a scaled rope; None = unscaled.
        name: folder or hub id it was read from, for serve commands.
    """

    model_type: str
    architecture: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    max_position_embeddings: int
    rope_theta: float
    mrope_section: list[int] | None = None
    scaled_rope: dict[str, Any] | None = None
    name: str | None = None

    @property
    def fingerprint(self) -> dict[str, Any]:
        """As `sage.Target.fingerprint`."""
        return {key: getattr(self, key) for key in ("model_type", "hidden_size", "vocab_size", "num_layers")}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(stored: Any) -> TargetFacts:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a fact is missing, unknown, or of another type.
        """
        kinds = {field.name: str(field.type) for field in fields(TargetFacts)}
        needed = kinds.keys() - {"mrope_section", "scaled_rope", "name"}
        if not isinstance(stored, dict) or not needed <= stored.keys() or not stored.keys() <= kinds.keys():
            raise ValueError(f"target facts: need {', '.join(sorted(needed))}, found {stored}")
        for name in needed:
            wanted: Any = {"int": int, "float": (int, float)}.get(kinds[name], str)
            if not isinstance(stored[name], wanted):
                raise ValueError(f"target facts: {name} is {stored[name]!r}, expected {kinds[name]}")
        return TargetFacts(**stored)

    @staticmethod
    def of_draft(config: Any) -> TargetFacts:
        """What one of our drafts remembers of its target (its own sizes and rope were derived from it)."""
        made_for = config.target
        return TargetFacts(
            **made_for,
            architecture=ARCHITECTURES.get(made_for["model_type"], made_for["model_type"]),
            max_position_embeddings=config.max_position_embeddings,
            rope_theta=float(config.rope_theta),
            mrope_section=config.mrope_section,
            scaled_rope=config.scaled_rope,
            name=config.target_path,
        )

    @staticmethod
    def of_folder(path_or_id: str | Path) -> TargetFacts:
        """Reads a target's config.json; no weights are touched.

        Raises:
            ValueError: no readable config there, or not that of a known family.
        """
        from transformers import AutoConfig

        name = str(path_or_id)
        if not Path(name).is_dir() and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
            raise ValueError(f"--target {name}: no such folder; give a target's folder or a hub id like owner/name")
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"--target {path_or_id}: cannot read its config.json ({reason}); give a target's folder"
            ) from error
        if config.model_type not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"--target {path_or_id}: model_type {config.model_type!r} is not a known family; known: {known}")
        return TargetFacts.of_config(config, name)

    @staticmethod
    def of_config(config: Any, name: str | None) -> TargetFacts:
        """From a known family's config in memory, `model.config` of a loaded target.

        Raises:
            ValueError: a rope that no draft head can follow.
        """
        from sage.drafts.rope import rope_fields

        text = config.get_text_config()
        rope = rope_fields(text)
        return TargetFacts(
            model_type=config.model_type,
            architecture=(config.architectures or [ARCHITECTURES[config.model_type]])[0],
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            num_layers=text.num_hidden_layers,
            max_position_embeddings=text.max_position_embeddings,
            rope_theta=float(rope["rope_theta"]),
            mrope_section=rope["mrope_section"],
            scaled_rope=rope["scaled_rope"],
            name=name,
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: names the file and what is wrong with it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: missing or unreadable ({error.strerror or error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, not a JSON object")
    return content

"""The target of an export: facts from its config.json, or from the draft's own, and its tables; no model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpoints.export.folder import Weights
from sage.io.ranges import check_fields
from sage.targets.families import FAMILIES, family_of
from sage.targets.loading import read_architecture
from sage.targets.rope import RopeConfig
from sage.targets.weights import quantization_of

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
MERGED = "merged"  # folder of a target with its adapter, in commands


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """The fields of a target's config that a draft's config depends on."""

    model_type: str
    architecture: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    max_position_embeddings: int
    # rope_theta, mrope_section, mrope_interleaved, scaled_rope: as in `RopeConfig`
    rope_theta: float
    mrope_section: list[int] | None = None
    scaled_rope: dict[str, Any] | None = None
    mrope_interleaved: bool = False
    name: str | None = None  # folder or hub id the facts were read from, used in serve commands
    quantization: str | None = None  # method of the target's weights; None without
    quantize: str | None = None  # what its weights are quantized to at load; None keeps those of the folder
    # adapter, adapter_path: digest and folder or hub id of the adapter that the target contains; None without
    adapter: str | None = None
    adapter_path: str | None = None

    @property
    def rope(self) -> RopeConfig:
        """The target's rope."""
        return RopeConfig(self.rope_theta, self.mrope_section, self.scaled_rope, self.mrope_interleaved)

    @property
    def served_by(self) -> tuple[str, ...]:
        """Engines that serve drafts for the target's family."""
        return FAMILIES[self.model_type].served_by if self.is_known else ()

    @property
    def needs_plugin(self) -> bool:
        """Whether vLLM serves drafts for the target's family with our plugin only."""
        return self.is_known and FAMILIES[self.model_type].needs_plugin

    @property
    def has_images(self) -> bool:
        """Whether the target's family reads images."""
        return self.is_known and bool(FAMILIES[self.model_type].placeholders)

    @property
    def is_known(self) -> bool:
        """Whether the target's family is one of ours."""
        return self.model_type in FAMILIES

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The same fields as `sage.Target.fingerprint`."""
        fields = {key: getattr(self, key) for key in ("model_type", "hidden_size", "vocab_size", "num_layers")}
        return fields | {key: value for key in ("adapter", "quantize") if (value := getattr(self, key))}

    @property
    def merge_command(self) -> str:
        """The command line that writes the target with its adapter, as engines take it, to the folder `MERGED`."""
        target, auto_class = self.name or "TARGET", FAMILIES[self.model_type].auto_class.__name__
        loader = "AutoProcessor" if self.has_images else "AutoTokenizer"
        return (
            f"python -c \"import peft, transformers as t; model = t.{auto_class}.from_pretrained('{target}', dtype='auto'); "
            f"peft.PeftModel.from_pretrained(model, '{self.adapter_path}').merge_and_unload().save_pretrained('{MERGED}'); "
            f"t.{loader}.from_pretrained('{target}').save_pretrained('{MERGED}')\""
        )

    def adapted(self, config: Any) -> TargetFacts:
        """Returns the facts with the adapter and the quantization at load for which the draft of `config` was trained."""
        changes = {key: config.target.get(key) for key in ("adapter", "quantize")}
        return replace(self, **changes, adapter_path=config.target_adapter)

    @staticmethod
    def from_dict(stored: Any) -> TargetFacts:
        """Creates the facts from their fields; ValueError if one is missing, unknown, or of the wrong type."""
        try:
            facts = TargetFacts(**(stored or {}))
            check_fields(facts)
        except (TypeError, ValueError) as error:
            raise ValueError(f"target facts: {error}") from error
        return facts

    @staticmethod
    def of_draft(config: Any) -> TargetFacts:
        """Reads the facts from the config of a draft, whose sizes and rope were derived from the target."""
        return TargetFacts(
            **config.target,
            architecture=_architecture(config.target["model_type"]),
            max_position_embeddings=config.max_position_embeddings,
            rope_theta=float(config.rope_theta),
            mrope_section=config.mrope_section,
            mrope_interleaved=config.mrope_interleaved,
            scaled_rope=config.scaled_rope,
            name=config.target_path,
        )

    @staticmethod
    def of_folder(path_or_id: str | Path) -> TargetFacts:
        """Reads a target's config.json; ValueError if it cannot be read, or names an unknown family."""
        name = str(path_or_id)
        if not Path(name).is_dir() and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
            raise ValueError(f"--target {name}: no such folder; give a target's folder or a hub id like owner/name")
        return TargetFacts.of_config(read_architecture(name, "--target"), name)

    @staticmethod
    def of_config(config: Any, name: str | None) -> TargetFacts:
        """Reads the facts from `model.config`; ValueError for an unknown family, or a rope that no draft head follows."""
        family = family_of(config, f"--target {name}: ")
        text = config.get_text_config()
        return TargetFacts(
            model_type=config.model_type,
            architecture=(config.architectures or [_architecture(config.model_type)])[0],
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            num_layers=text.num_hidden_layers,
            max_position_embeddings=text.max_position_embeddings,
            **family.rope().fields,
            name=name,
            quantization=quantization_of(config),
        )


def _architecture(model_type: str) -> str:
    """Returns the class of a target; its `model_type` if the family is unknown."""
    family = FAMILIES.get(model_type)
    return family.model_types[model_type] if family else model_type


# -- tables ------------------------------------------------------------------------------------------------------------


def read_table(facts: TargetFacts, name: str) -> Tensor:
    """Reads `EMBEDDING` or `LM_HEAD` [V, D] from the target's folder or from the hub's cache, without any download.

    A target without an lm_head has the embedding in its place.

    Raises:
        ValueError: the target's files are not available, or do not contain exactly one such tensor.
    """
    from huggingface_hub import snapshot_download

    name_of_target, shape = facts.name or "(unknown)", (facts.vocab_size, facts.hidden_size)
    folder = Path(name_of_target)
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(name_of_target, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"embedding: the target {name_of_target} is neither a local folder nor in the hub's cache; give --target DIR, "
            f"or --no-embedding (engines take the embedding from the target)"
        ) from error
    weights = Weights(folder)
    tables = [saved for saved, info in weights.infos.items() if info.shape == shape]
    names = [saved for saved in tables if saved.endswith(name)] or [saved for saved in tables if saved.endswith(EMBEDDING)]
    if len(names) != 1:
        raise ValueError(
            f"embedding: {folder} has {len(names)} tensors named *{EMBEDDING} of shape {list(shape)}, expected one; "
            f"give --target DIR, or --no-embedding"
        )
    return weights[names[0]]

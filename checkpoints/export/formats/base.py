"""The interface of an export format. Everything that the package knows about a format is in its object.

A format is a subclass in a module of this folder and a row of `checkpoints.export.formats.registry`. Owns: what formats have in
common. Does not own: the order of steps (checkpoints.export.exporter, importer, checks), targets (TargetFacts).

Shapes: B batch, T tokens, D hidden, A feature levels.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from checkpoints.export.configs import (
    EMBEDDING,
    FEATURE_LEVELS,
    EngineConfig,
    TargetFacts,
    TensorSpecs,
    layer_config,
    read_target_embedding,
)
from checkpoints.export.folder import Weights
from checkpoints.export.formats.row import FormatRow
from sage.drafts.head import DraftHead
from sage.io.dtypes import dtype_name
from sage.io.model_files import read_config
from sage.targets.rope import RopeConfig

SPECULATIVE_TOKENS = 3
SGLANG_TOPK, SGLANG_NODES = 4, 16
BATCH, TOKENS, SEED = 2, 7, 0  # of the batch on which an export is compared with the trained draft
SAVED_LAYER = "layers.0."  # prefix of a layer's tensors in the folders of most trainers
PREFIXES = ("model.", "draft_model.", "module.")
VERIFIERS_OWN = ("verifier_lm_head.weight", "verifier_norm.weight")  # the target's own tensors
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Finding:
    """One error or warning: the tensor, config field or file, its value, and its effect in an engine."""

    where: str
    found: str
    effect: str
    is_warning: bool = False  # the draft can be served

    def __str__(self) -> str:
        return f"{self.where}: {self.found}; {self.effect}"


@dataclass
class CheckInput:
    """The folder to check.

    Attributes:
        specs: expected tensors; none if the config lacks sizes.
        facts: about the target, if known.
        trained_levels: the feature levels that an export of this package was trained with; None for other folders.
    """

    format: ExportFormat
    config: EngineConfig
    weights: Weights
    specs: TensorSpecs
    facts: TargetFacts | None
    folder: Path
    trained_levels: list[Any] | None = None

    def at(self, key: str, found: str, effect: str) -> Finding:
        """Returns a finding about a field of the decoder layer."""
        return Finding(self.config.key_path(key), found, effect)


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


Checks = tuple[Callable[[CheckInput], Iterator[Finding]], ...]


@dataclass(frozen=True)
class ExportFormat(ABC):
    """An export format in one of its flavours.

    Class attributes:
        draft: the class that an export is read back as.
        checks: yield the findings about a folder, in the order in which they are reported.
        expressed: config fields of the draft that the format contains or that `obstacles` checks, besides those of all heads.
        own_layer, layer: prefixes of the layer's tensors in our draft and in the format.
        layer_types: the `model_type` of the layer that engines know.
        other_classes: class names besides `engine_class` that vLLM alone loads.
        method: the engines' name of the kind of draft.
        algorithm: `speculators_model_type`, in the layout of the package speculators.
        has_embedding: whether the target's token embedding is written by default.
        num_levels: number of the target's feature levels that the draft reads; None: any.
        borrowed: the target's tables that a folder may contain and an imported draft takes from the target.
        has_code: whether its folders may name Python code, which engines do not need.
        effect_without_length: what engines do without `max_position_embeddings`.
        effect_of_unexpected: what engines do about a tensor that they do not know.
        difference_of, agreement_is: what the reload check compares, for the model card.
    """

    row: FormatRow
    flavour: str | None = None

    draft: ClassVar[type[DraftHead]]
    checks: ClassVar[Checks]
    expressed: ClassVar[tuple[str, ...]] = ()
    own_layer: ClassVar[str]
    layer: ClassVar[str]
    layer_types: ClassVar[tuple[str, ...]] = ("llama",)
    other_classes: ClassVar[tuple[str, ...]] = ()
    method: ClassVar[str]
    algorithm: ClassVar[str] = ""
    has_embedding: ClassVar[bool] = False
    num_levels: ClassVar[int | None] = FEATURE_LEVELS
    borrowed: ClassVar[tuple[str, ...]] = (EMBEDDING,)
    has_code: ClassVar[bool] = False
    effect_without_length: ClassVar[str] = "LlamaConfig's default is 2048: beyond it acceptance is 1.00"
    effect_of_unexpected: ClassVar[str] = "vLLM stops at an unknown name, SGLang skips it without a message"
    difference_of: ClassVar[str] = "a logit"
    agreement_is: ClassVar[str] = "positions with the same top-1 token"

    # -- names ---------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The choice `--format NAME`."""
        return self.row.name

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines that load it."""
        return self.row.engines.get(self.flavour, ())

    @property
    def label(self) -> str:
        """The name in messages: `eagle for sglang`."""
        return f"{self.name} for {self.flavour}" if self.flavour else self.name

    @property
    def choice(self) -> str:
        """The value of `--format`, with the flavour: `eagle --flavour sglang`."""
        return f"{self.name} --flavour {self.flavour}" if self.flavour else self.name

    # -- export --------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def engine_class(self) -> str:
        """The class name in `architectures`."""

    def config(self, draft: Any, facts: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
        """Returns config.json for the configuration of a trained draft, exported in `dtype`."""
        classes = {"architectures": [self.engine_class], "model_type": "llama"}
        dtypes = dict.fromkeys(("dtype", "torch_dtype"), dtype_name(dtype))
        return {**classes, **layer_config(draft, facts), **dtypes}

    def tensors(self, state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns a trained draft's tensors under the format's names."""
        return {
            with_prefix(name, self.own_layer, self.layer): tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in state.items()
        }

    def target_tensors(self, trained: DraftHead, facts: TargetFacts, embedding: bool | None) -> dict[str, Tensor]:
        """Reads the tensors of the target that the format contains.

        Args:
            embedding: whether to write the target's embedding; None = the format's default.

        Raises:
            ValueError: the target's files are not available, or the format needs the embedding.
        """
        is_written = self.has_embedding if embedding is None else embedding
        return {EMBEDDING: read_target_embedding(facts)} if is_written else {}

    def speculative_tokens(self, draft: Any) -> int:
        """Returns the number of drafted tokens per round in serve commands, for the configuration of a draft."""
        return SPECULATIVE_TOKENS

    def most_tokens(self, draft: Any) -> int | None:
        """Returns how many tokens a draft was trained to propose per round; None: any number."""
        return None

    def rope(self, facts: TargetFacts) -> RopeConfig:
        """Returns the rope that engines compute in a draft for this target."""
        return facts.rope

    def served_by(self, facts: TargetFacts) -> tuple[str, ...]:
        """Returns the engines that serve such drafts for the target's family."""
        return facts.served_by

    @abstractmethod
    def obstacles(self, draft: Any, facts: TargetFacts) -> Iterator[Obstacle]:
        """Yields the settings of a draft that the format cannot express."""

    def warnings(self, draft: Any, facts: TargetFacts) -> list[str]:
        """Returns what an engine that serves the target computes differently from training, as complete sentences."""
        return []

    # -- folders -------------------------------------------------------------------------------------------------------

    def recognizes(self, config: EngineConfig) -> bool:
        """Returns whether engines load a folder with this config.json as a draft of this format and flavour."""
        return self.engine_class in config.classes

    @abstractmethod
    def specs(self, config: EngineConfig) -> TensorSpecs | None:
        """Returns the expected tensors under the format's names; None if the config lacks sizes."""

    def own_name(self, name: str) -> str:
        """Returns the name that a tensor has in our draft."""
        return with_prefix(name, SAVED_LAYER, self.own_layer)

    def read(self, folder: Path, facts: TargetFacts, options: ImportOptions) -> DraftHead:
        """Reads a folder in this format as a draft of this package, in the dtype of its file.

        Raises:
            ValueError: names the field or tensor that is wrong, missing, or cannot be expressed.
        """
        config = EngineConfig(read_config(folder))
        own_config = self.draft_config(folder, config, facts, options)
        tensors = self.draft_tensors(folder, config, facts)
        draft = self.draft(own_config)
        draft.to(next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()))
        draft.load_state_dict(tensors)
        return draft.eval()

    @abstractmethod
    def draft_config(self, folder: Path, config: EngineConfig, facts: TargetFacts, options: ImportOptions) -> Any:
        """Returns the configuration of the draft in a folder; ValueError for what our draft does not support."""

    def draft_tensors(self, folder: Path, config: EngineConfig, facts: TargetFacts) -> dict[str, Tensor]:
        """Reads the tensors of our draft from a folder; those of the target and constants are left out.

        Raises:
            ValueError: names the tensors that are missing, unknown or misshapen.
        """
        weights = Weights(folder)
        specs = {self.own_name(name): spec for name, spec in (self.specs(config) or {}).items()}
        names = {self.own_name(without_prefixes(name)): name for name in weights.infos}
        ignored = (*self.borrowed, *VERIFIERS_OWN)
        names = {ours: name for ours, name in names.items() if ours not in ignored and not ours.endswith(IGNORED_SUFFIXES)}
        needed = [name for name, spec in specs.items() if not (spec.is_optional or name in self.borrowed)]
        if missing := [name for name in needed if name not in names]:
            raise ValueError(f"{folder}: {', '.join(missing)}: missing; the draft is incomplete")
        if unknown := sorted(name for ours, name in names.items() if ours not in specs):
            head = self.row.imports or self.name
            raise ValueError(f"{folder}: {', '.join(unknown)}: not part of our {head} head, cannot import this draft")
        for ours, name in names.items():
            found, expected = list(weights.infos[name].shape), list(specs[ours].shape)
            if found != expected:
                raise ValueError(f"{folder}: {ours} has shape {found}, {expected} according to config.json")
        return {ours: weights[name] for ours, name in names.items() if not specs[ours].is_zero}

    def borrowed_rows(self, name: str, own: Tensor, table: Tensor, weights: Weights, config: EngineConfig) -> Tensor:
        """Returns what a table in a folder must equal, so that our decoder can take it from the target.

        Args:
            name: one of `borrowed`.
            own: the table in the folder.
            table: [V, D], the target's.
        """
        return table

    # -- the reload check ----------------------------------------------------------------------------------------------

    @abstractmethod
    def outputs(self, draft: DraftHead) -> Tensor:
        """Runs a draft on `fixed_batch`; an export must yield the same, bit for bit, as the trained draft."""

    def agreement(self, before: Tensor, after: Tensor) -> Tensor:
        """Returns the mean agreement, 0 to 1, of the trained draft's outputs and the rounded one's, [.., V] each."""
        return (before.argmax(-1) == after.argmax(-1)).float().mean()

    # -- engines -------------------------------------------------------------------------------------------------------

    @property
    def vllm_options(self) -> dict[str, Any]:
        """The fields of vLLM's `speculative_config` besides the folder and the number of tokens."""
        return {"method": self.method}

    def serve_command(self, engine: str, target: str, draft: str, tokens: int = SPECULATIVE_TOKENS) -> str:
        """Returns the command line that serves a target with the folder or hub id of an export, drafting `tokens` per round."""
        if engine == "vLLM":
            options = {**self.vllm_options, "model": draft, "num_speculative_tokens": tokens}
            return f"vllm serve {target} \\\n  --speculative-config '{json.dumps(options)}'"
        return (
            f"python -m sglang.launch_server --model-path {target} \\\n"
            f"  --speculative-algorithm {self.method.upper()} --speculative-draft-model-path {draft} \\\n"
            f"  --speculative-num-steps {tokens} --speculative-eagle-topk {SGLANG_TOPK} "
            f"--speculative-num-draft-tokens {SGLANG_NODES}"
        )


def with_prefix(name: str, old: str, new: str) -> str:
    """Replaces a prefix of a tensor's name, if it has it."""
    return new + name.removeprefix(old) if name.startswith(old) else name


def without_prefixes(name: str) -> str:
    """Returns the name of a tensor without those of the modules around the draft."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def fixed_batch(draft: DraftHead) -> tuple[Tensor, Tensor, Tensor]:
    """Returns embeddings [B, T, D], features [B, T, A * D] and positions ([3, B, T] for M-RoPE), the same in every call."""
    generator = torch.Generator().manual_seed(SEED)
    size = draft.config.hidden_size
    embeds = torch.randn(BATCH, TOKENS, size, generator=generator)
    num_levels = len(getattr(draft.config, "feature_levels", None) or range(FEATURE_LEVELS))
    levels = torch.randn(BATCH, TOKENS, num_levels * size, generator=generator)
    shape = (3, BATCH, TOKENS) if draft.config.mrope_section else (BATCH, TOKENS)
    positions = torch.randint(0, 64, shape, generator=generator)
    return embeds.to(draft.dtype), levels.to(draft.dtype), positions

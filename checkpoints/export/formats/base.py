"""The interface of an export format, and what formats say about a folder or a draft.

A format is a subclass in a module of this folder and a row of `checkpoints.export.registry`: a template of config.json
(configs.yaml), a map of tensor names, the expected tensors, and the checks of a folder, which `--check` and `--import` share.

Shapes: B batch, T tokens, D hidden, A feature levels.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from checkpoints.export.configs import DEFAULT_EPS, FEATURE_LEVELS, SIZES, TEMPLATES, EngineConfig, TensorSpecs, fill
from checkpoints.export.folder import Weights
from checkpoints.export.registry import FormatRow
from checkpoints.export.target import EMBEDDING, TargetFacts, read_table
from sage.drafts.head import DraftHead
from sage.io.dtypes import dtype_name
from sage.io.model_files import read_config
from sage.targets.rope import RopeConfig

SPECULATIVE_TOKENS = 3
SGLANG_TREE = " \\\n  --speculative-num-steps {} --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
BATCH, TOKENS, SEED = 2, 7, 0  # of the batch on which an export is compared with the trained draft
PREFIXES = ("model.", "draft_model.", "module.")
IGNORED = ("verifier_lm_head.weight", "verifier_norm.weight")  # the target's own tensors
IGNORED_SUFFIX = "rotary_emb.inv_freq"
MAPS = ("d2t", "t2d")
TYPE = "speculators_model_type"
BF16_EPS = 2**-7  # relative rounding error of bf16
Table = Callable[[], Tensor]  # returns a table of the target, [V, D]


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


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Values that the folder of a third-party draft leaves open."""

    levels: tuple[int, ...] | None = None  # feature levels, where the folder gives none or contradictory ones
    # draft inputs at image positions in training; None = as in sage_export.json, else `embed`
    image_inputs: str | None = None
    use_target_rope: bool = False  # use the target's rope even if the folder's config specifies another


@dataclass
class CheckInput:
    """The folder to check."""

    format: ExportFormat
    config: EngineConfig
    weights: Weights
    facts: TargetFacts | None  # about the target, if known
    folder: Path
    # the feature levels that an export of this package was trained with; None for other folders
    trained_levels: list[Any] | None = None
    options: ImportOptions | None = None  # of an import; None: a check for engines
    # of an import: the target's, by name in the format, if they can be read
    tables: Mapping[str, Table] = field(default_factory=dict)

    @cached_property
    def specs(self) -> TensorSpecs:
        """Expected tensors; none if the config lacks sizes."""
        return self.format.specs(self.config) if all(self.config.sizes) else {}

    def at(self, key: str, found: str, effect: str, **more: Any) -> Finding:
        """Returns a finding about a field of the decoder layer."""
        return Finding(self.config.key_path(key), found, effect, **more)


Checks = tuple[Callable[[CheckInput], Iterator[Finding]], ...]


@dataclass(frozen=True)
class ExportFormat(ABC):
    """An export format in one of its flavours."""

    row: FormatRow
    flavour: str | None = None

    template: ClassVar[str]  # of config.json, in configs.yaml
    draft: ClassVar[type[DraftHead]]  # the class that an export is read back as
    # config fields of the draft that the format contains or that `obstacles` checks, besides those of all heads
    expressed: ClassVar[tuple[str, ...]] = ()
    # own_layer, layer: prefixes of the layer's tensors in our draft and in the format
    own_layer: ClassVar[str]
    layer: ClassVar[str]
    layer_types: ClassVar[tuple[str, ...]] = ("llama",)  # the `model_type` of the layer that engines know
    engine_class: ClassVar[str]  # the class name in `architectures`
    other_classes: ClassVar[tuple[str, ...]] = ()  # class names besides `engine_class` that vLLM alone loads
    checks: ClassVar[Checks]  # of a folder, in the order in which findings are reported
    method: ClassVar[str]  # the engines' name of the kind of draft
    algorithm: ClassVar[str] = ""  # `speculators_model_type`, in the layout of the package speculators
    has_embedding: ClassVar[bool] = False  # whether the target's token embedding is written by default
    # number of the target's feature levels that the draft reads; None: any
    num_levels: ClassVar[int | None] = FEATURE_LEVELS
    # the target's tables that a folder may contain and an imported draft takes from the target
    borrowed: ClassVar[tuple[str, ...]] = (EMBEDDING,)
    # whether the config states the axes of the target's M-RoPE; else positions count along the stream
    has_axes: ClassVar[bool] = True
    has_code: ClassVar[bool] = False  # whether its folders may name Python code, which engines do not need
    names_target: ClassVar[bool] = False  # whether vLLM reads target and settings from config.json
    environment: ClassVar[str] = ""  # variables that vLLM needs, in front of its command
    sglang_tree: ClassVar[str] = SGLANG_TREE  # options of SGLang's command line for a number of drafted tokens
    # what engines do about a tensor that they do not know
    effect_of_unexpected: ClassVar[str] = "vLLM stops at an unknown name, SGLang skips it without a message"
    output: ClassVar[str] = "logit"  # what the reload check compares: `logit`, or the name of a vector

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

    def for_draft(self, draft: Any) -> ExportFormat:
        """Returns the format for the configuration of a draft: itself, where all kinds of draft have the same one."""
        return self

    def config(self, draft: Any, facts: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
        """Returns config.json for the configuration of a trained draft, exported in `dtype`."""
        values = {"draft": draft, "facts": facts, "format": self, "dtype": dtype_name(dtype)}
        values |= {"tokens": self.most_tokens(draft) or SPECULATIVE_TOKENS, **self.config_values(draft, facts)}
        filled: dict[str, Any] = fill(TEMPLATES[self.template], values)
        return filled

    def config_values(self, draft: Any, facts: TargetFacts) -> dict[str, Any]:
        """Returns further values of the template: here the target's rope as in transformers 4 and, without axes, 5."""
        scaled = dict(facts.scaled_rope or {})
        axes: dict[str, Any] = {"type": "mrope", "rope_type": "default", "mrope_section": facts.mrope_section}
        axes |= {"mrope_interleaved": True} if facts.mrope_interleaved else {}
        return {
            "rope_scaling": axes if facts.mrope_section else scaled or None,
            "rope_parameters": {"rope_type": "default", "rope_theta": facts.rope_theta} | scaled,
        }

    def tensors(self, state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns a trained draft's tensors under the format's names, without maps for a full draft vocabulary."""
        is_full = "d2t" not in state or len(state["d2t"]) == len(state["t2d"])
        return {
            with_prefix(name, self.own_layer, self.layer): tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in state.items()
            if not (is_full and name in MAPS)
        }

    def target_tensors(self, trained: DraftHead, facts: TargetFacts, embedding: bool | None) -> dict[str, Tensor]:
        """Reads the target's tensors of the format; `embedding`: whether with that, None: by default. ValueError without it."""
        is_written = self.has_embedding if embedding is None else embedding
        return {EMBEDDING: read_table(facts, EMBEDDING)} if is_written else {}

    def most_tokens(self, draft: Any) -> int | None:
        """Returns how many tokens a draft was trained to propose per round; None: any number."""
        return None

    def rope(self, facts: TargetFacts) -> RopeConfig:
        """Returns the rope that engines compute in a draft for this target."""
        return facts.rope

    def served_by(self, facts: TargetFacts) -> tuple[str, ...]:
        """Returns the engines that serve such drafts for the target's family."""
        return facts.served_by

    def needs_plugin(self, facts: TargetFacts) -> bool:
        """Returns whether vLLM serves such drafts for the target's family with our plugin only."""
        return facts.needs_plugin

    def engine_label(self, engine: str, facts: TargetFacts) -> str:
        """Returns the name of an engine in messages, with our plugin where it is needed."""
        return "vLLM with our plugin" if engine == "vLLM" and self.needs_plugin(facts) else engine

    @abstractmethod
    def obstacles(self, draft: Any, facts: TargetFacts) -> Iterator[Obstacle]:
        """Yields the settings of a draft that the format cannot express."""

    def warnings(self, draft: Any, facts: TargetFacts) -> list[str]:
        """Returns what an engine that serves the target computes differently from training, as complete sentences."""
        return []

    def complete(  # noqa: B027 most formats have no further files
        self, folder: Path, facts: TargetFacts, dtype: torch.dtype, converter: str | None
    ) -> None:
        """Adds files to a checked export, converted by `converter`; ValueError if it fails or writes something else."""

    # -- folders -------------------------------------------------------------------------------------------------------

    def recognizes(self, config: EngineConfig) -> bool:
        """Returns whether engines load a folder with this config.json as a draft of this format and flavour."""
        return config.raw.get(TYPE) == self.algorithm if self.algorithm else self.engine_class in config.classes

    @abstractmethod
    def specs(self, config: EngineConfig) -> TensorSpecs:
        """Returns the expected tensors under the format's names; none if the config lacks the number of layers or levels."""

    def own_name(self, name: str) -> str:
        """Returns the name that a tensor of the format has in our draft."""
        return with_prefix(name, self.layer, self.own_layer)

    def format_name(self, name: str) -> str | None:
        """Returns the format's name of a tensor as a trainer saved it; None for one that is not the draft's."""
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        return None if name in IGNORED or name.endswith(IGNORED_SUFFIX) else with_prefix(name, self.own_layer, self.layer)

    def read(
        self, folder: Path, facts: TargetFacts, options: ImportOptions, tables: Mapping[str, Table] | None = None
    ) -> DraftHead:
        """Reads a folder as our draft, in the dtype of its file; ValueError names what is wrong or cannot be expressed."""
        config, weights = EngineConfig(read_config(folder)), Weights(folder, self.format_name)
        given = CheckInput(self, config, weights, facts, folder, options=options, tables=tables or {})
        for finding in (finding for check in (*self.checks, _borrowed) for finding in check(given)):
            if finding.refusal:
                raise ValueError(f"{folder}: {finding.where}: {finding.found}; {finding.refusal}")
        tensors = self.draft_tensors(given, facts)
        draft = self.draft(self.draft_config(given, facts, options))
        draft.to(next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()))
        draft.load_state_dict(tensors)
        return draft.eval()

    @abstractmethod
    def draft_config(self, given: CheckInput, facts: TargetFacts, options: ImportOptions) -> Any:
        """Returns the configuration of the draft in a folder without refused findings."""

    def head_fields(self, config: EngineConfig, facts: TargetFacts, options: ImportOptions) -> dict[str, Any]:
        """Returns the fields that the configurations of all heads have."""
        own = config.rope if self.has_axes else self.rope(facts)._replace(theta=config.rope.theta, scaled=config.rope.scaled)
        return {
            **{key: config.size(key) for key in SIZES},
            "head_dim": config.head_dim,
            "rms_norm_eps": config.get("rms_norm_eps") or DEFAULT_EPS,
            "hidden_act": config.get("hidden_act") or "silu",
            "max_position_embeddings": facts.max_position_embeddings,
            **(self.rope(facts) if options.use_target_rope else own).fields,
            "target": facts.fingerprint,
            "target_path": facts.name,
            "target_adapter": facts.adapter_path,
        }

    def draft_tensors(self, given: CheckInput, facts: TargetFacts) -> dict[str, Tensor]:
        """Reads the tensors of our draft from a folder; those of the target and constants are left out.

        Our head always has d2t [U] and t2d [V]: where the folder omits them, draft ids are target ids.
        """
        names = [name for name in given.weights.infos if name not in self.borrowed and not given.specs[name].is_zero]
        tensors = {self.own_name(name): given.weights[name] for name in names}
        if "d2t" in given.specs:
            d2t = tensors.get("d2t", torch.zeros(given.specs["d2t"].shape, dtype=torch.int64)).to(torch.int64)
            t2d = torch.zeros(facts.vocab_size, dtype=torch.bool)
            t2d[torch.arange(len(d2t)) + d2t] = True
            tensors |= {"d2t": d2t, "t2d": t2d}
        return tensors

    def borrowed_rows(self, name: str, table: Tensor, given: CheckInput) -> Tensor:
        """Returns what a folder's table, one of `borrowed`, must equal for our decoder to take the target's, `table`."""
        return table

    # -- the reload check ----------------------------------------------------------------------------------------------

    @abstractmethod
    def outputs(self, draft: DraftHead) -> Tensor:
        """Runs a draft on `fixed_batch`; an export must yield the same, bit for bit, as the trained draft."""

    def agreement(self, before: Tensor, after: Tensor) -> Tensor:
        """Returns the mean agreement, 0 to 1, of the trained draft's outputs and the rounded one's, [.., V] each."""
        if self.output == "logit":
            return (before.argmax(-1) == after.argmax(-1)).float().mean()
        return torch.nn.functional.cosine_similarity(before, after, dim=-1).mean()

    @property
    def agreement_is(self) -> str:
        """What `agreement` measures, for the model card."""
        return "positions with the same top-1 token" if self.output == "logit" else f"cosine similarity of the {self.output}s"

    # -- engines -------------------------------------------------------------------------------------------------------

    @property
    def vllm_options(self) -> dict[str, Any]:
        """The fields of vLLM's `speculative_config` besides the folder and the number of tokens."""
        return {"method": self.method}

    def serve_command(self, engine: str, target: str, draft: str, tokens: int = SPECULATIVE_TOKENS) -> str:
        """Returns the command line that serves a target with the folder or hub id of an export, drafting `tokens` per round."""
        if engine == "vLLM" and self.names_target:
            return f"{self.environment}vllm serve {draft}"
        if engine == "vLLM":
            options = {**self.vllm_options, "model": draft, "num_speculative_tokens": tokens}
            return f"{self.environment}vllm serve {target} \\\n  --speculative-config '{json.dumps(options)}'"
        return (
            f"python -m sglang.launch_server --model-path {target} \\\n"
            f"  --speculative-algorithm {self.method.upper()} --speculative-draft-model-path {draft}"
            f"{self.sglang_tree.format(tokens)}"
        )


def with_prefix(name: str, old: str, new: str) -> str:
    """Replaces a prefix of a tensor's name, if it has it."""
    return new + name.removeprefix(old) if name.startswith(old) else name


def _borrowed(given: CheckInput) -> Iterator[Finding]:
    """Yields the tables that differ from the target's by more than rounding to bf16: our decoder uses the target's."""
    for name in given.tables.keys() & given.weights.infos.keys() & {*given.format.borrowed}:
        own, rows = given.weights[name], given.format.borrowed_rows(name, given.tables[name](), given)
        gap = (own.float() - rows.float()).abs().max() if own.shape == rows.shape else torch.tensor(torch.inf)
        if not bool(gap <= BF16_EPS * rows.abs().max()):
            refusal = "it was trained, but our decoder uses the target's for every such draft; cannot import it"
            yield Finding(name, f"differs from the target's by up to {float(gap):.3g}", "", refusal=refusal)


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

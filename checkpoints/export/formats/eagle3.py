"""The `eagle3` format: one folder that both vLLM and SGLang load.

Feature levels: the default of both engines is not written. Other levels are written twice: vLLM uses
`eagle_aux_hidden_state_layer_ids` unchanged, SGLang reads the one in `eagle_config` and adds one. Levels 1, 4, 7:

    eagle_aux_hidden_state_layer_ids: [1, 4, 7]    eagle_config.eagle_aux_hidden_state_layer_ids: [0, 3, 6]

Folders of SpecForge, AngelSlim and SafeAILab are in this format too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from checkpoints.export import checks as common
from checkpoints.export.configs import (
    EMBEDDING,
    FEATURE_LEVELS,
    LEVELS_KEY,
    EngineConfig,
    TargetFacts,
    TensorSpec,
    TensorSpecs,
    default_levels,
    layer_specs,
)
from checkpoints.export.folder import CONFIG, export_info
from checkpoints.export.formats.base import CheckInput, Checks, ExportFormat, Finding, ImportOptions, Obstacle, fixed_batch
from checkpoints.export.tensor_checks import check_tensors, vocabulary_maps, with_vocabulary_maps
from sage.drafts.eagle3 import Eagle3Config, Eagle3Draft
from sage.drafts.head import DraftHead
from sage.targets.rope import RopeConfig

NO_LM_HEAD = "engines use the target's lm_head or a random one: acceptance 1.00, no error"
NO_D2T = "engines take draft ids for target ids and propose the wrong tokens: acceptance 1.00, no error"
NO_T2D = "speculators cannot train or verify the draft"
UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias", "bias")


def draft_vocabulary(given: CheckInput) -> Iterator[Finding]:
    """Yields the finding about a `draft_vocab_size` that is missing or too large."""
    config, vocab = given.config, given.config.size("vocab_size")
    draft_vocab = config.get("draft_vocab_size")
    if config.size("draft_vocab_size") is None:
        yield Finding("draft_vocab_size", f"{draft_vocab!r}", "SGLang uses the target's lm_head instead of the trained one")
    elif vocab and draft_vocab > vocab:
        found = f"{draft_vocab}, larger than vocab_size {vocab}"
        yield Finding("draft_vocab_size", found, "draft ids are outside the vocabulary")


def feature_levels(given: CheckInput) -> Iterator[Finding]:
    """Yields findings about levels that engines cannot capture or read differently; without any, the default applies."""
    config, facts = given.config, given.facts
    default = default_levels(facts.num_layers) if facts else None
    written = {"vLLM": config.vllm_levels, "SGLang": config.sglang_levels}
    levels_of = {engine: written[engine] or default for engine in given.format.engines}
    for engine, levels in levels_of.items():
        count = given.format.num_levels
        if levels is not None and (effect := _levels_error(levels, facts.num_layers if facts else None, count)):
            yield Finding(LEVELS_KEY, f"{engine} reads hidden_states{levels}", effect)
    if len({str(levels) for levels in levels_of.values()}) > 1:
        found = ", ".join(f"{engine} reads hidden_states{levels or ' default'}" for engine, levels in levels_of.items())
        effect = "one of the engines feeds it other features than in training: acceptance near 1.00"
        yield Finding(f"{LEVELS_KEY} and eagle_config.{LEVELS_KEY}", found, effect)


def _levels_error(levels: list[Any], num_layers: int | None, count: int | None) -> str | None:
    if count not in (None, len(levels)) or not all(isinstance(level, int) for level in levels):
        return f"fc takes exactly {count or len(levels)} levels"
    if any(later <= earlier for earlier, later in zip(levels, levels[1:], strict=False)) or levels[0] < 0:
        return "engines capture levels in increasing order, whatever order is written"
    if num_layers is not None and levels[-1] >= num_layers:
        return f"the target has {num_layers} layers and engines only capture the inputs of layers 0 to {num_layers - 1}"
    return None


def _null_target_size(given: CheckInput) -> Iterator[Finding]:
    key = "target_hidden_size"
    if given.config.raw.get(key, ...) is None:
        yield Finding(key, "null", "SGLang multiplies it by three and stops; omit the field")


class Eagle3Format(ExportFormat):
    """EAGLE-3 drafts for vLLM and SGLang.

    Class attributes:
        needs_t2d: whether a reduced draft vocabulary needs t2d.
        has_axes: whether the config states the axes of the target's M-RoPE.
    """

    draft = Eagle3Draft
    expressed: ClassVar[tuple[str, ...]] = ("feature_levels", "draft_vocab_size", "norm_before_residual")
    own_layer = layer = "midlayer."
    engine_class = "LlamaForCausalLMEagle3"
    other_classes: ClassVar[tuple[str, ...]] = ("Eagle3LlamaForCausalLM", "LlamaForCausalLM")  # AngelSlim's and SafeAILab's
    method = "eagle3"
    needs_t2d: ClassVar[bool] = False
    has_axes: ClassVar[bool] = True
    checks: ClassVar[Checks] = (
        *(*common.LAYER_CHECKS, common.single_layer, draft_vocabulary, _null_target_size),
        *(common.unsupported_residual, feature_levels, check_tensors, vocabulary_maps),
    )

    def config(self, draft: Any, facts: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
        config = super().config(draft, facts, dtype) | {"draft_vocab_size": draft.draft_vocab_size}
        if list(draft.feature_levels) != default_levels(facts.num_layers):
            config[LEVELS_KEY] = list(draft.feature_levels)
            config["eagle_config"] = {LEVELS_KEY: [k - 1 for k in draft.feature_levels], "use_aux_hidden_state": True}
        return config

    def tensors(self, state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Without maps for a full draft vocabulary."""
        is_full = len(state["d2t"]) == len(state["t2d"])
        kept = {name: tensor for name, tensor in state.items() if not (is_full and name in ("d2t", "t2d"))}
        return super().tensors(kept, dtype)

    def obstacles(self, draft: Any, facts: TargetFacts) -> Iterator[Obstacle]:
        if draft.norm_before_residual and "SGLang" in self.engines:
            remedy = "--format speculators serves it with vLLM"
            problem = "true, which SGLang does not support"
            yield Obstacle(key="draft.norm_before_residual", value="true", problem=problem, remedy=remedy)
        levels = list(draft.feature_levels)
        if _levels_error(levels, facts.num_layers, self.num_levels):
            allowed = f"{_counted(self.num_levels)} increasing levels of 0..{facts.num_layers - 1}"
            problem = f"{levels} cannot be served: engines fuse {allowed}"
            yield Obstacle(key="draft.feature_levels", value=str(levels), problem=problem, remedy="train with such levels")

    def recognizes(self, config: EngineConfig) -> bool:
        return "draft_vocab_size" in config.raw or any("Eagle3" in name for name in config.classes)

    def specs(self, config: EngineConfig) -> TensorSpecs | None:
        if (sizes := config.sizes) is None:
            return None
        hidden, vocab = sizes.hidden, sizes.vocab
        draft_vocab = config.size("draft_vocab_size") or vocab
        is_full = vocab == draft_vocab
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        return {
            **{f"{self.layer}{name}.weight": TensorSpec((hidden,)) for name in norms},
            **layer_specs(sizes, self.layer, attention_input=2 * hidden),
            "fc.weight": TensorSpec((hidden, FEATURE_LEVELS * hidden)),
            "norm.weight": TensorSpec((hidden,)),
            "lm_head.weight": TensorSpec((draft_vocab, hidden), effect_if_missing=NO_LM_HEAD),
            EMBEDDING: TensorSpec((vocab, hidden), is_optional=True),
            "d2t": TensorSpec((draft_vocab,), "int64", is_optional=is_full, effect_if_missing=NO_D2T),
            "t2d": TensorSpec((vocab,), "bool", is_optional=is_full or not self.needs_t2d, effect_if_missing=NO_T2D),
        }

    def draft_config(self, folder: Path, config: EngineConfig, facts: TargetFacts, options: ImportOptions) -> Eagle3Config:
        self.check_supported(folder, config, facts)
        return Eagle3Config(**self.config_fields(folder, config, facts, options))

    def config_fields(self, folder: Path, config: EngineConfig, facts: TargetFacts, options: ImportOptions) -> dict[str, Any]:
        """Returns the fields of our draft's configuration; ValueError for those that are missing or invalid."""
        if self.specs(config) is None:
            raise ValueError(f"{folder / CONFIG}: layer sizes are missing; give the number of heads and intermediate_size")
        eps, activation = config.get("rms_norm_eps", 1e-6), config.get("hidden_act", "silu")
        if not isinstance(eps, float) or not 0 < eps < 1 or activation not in ("silu", "gelu", "relu"):
            raise ValueError(f"{folder / CONFIG}: rms_norm_eps {eps!r} or hidden_act {activation!r} is invalid")
        return {
            **{key: config.size(key) for key in common.SIZES},
            "head_dim": config.head_dim,
            "draft_vocab_size": config.size("draft_vocab_size") or facts.vocab_size,
            "max_position_embeddings": facts.max_position_embeddings,
            "rms_norm_eps": eps,
            "hidden_act": activation,
            **self.read_rope(folder, config, facts, options).fields,
            "norm_before_residual": self.norm_before_residual(folder, config),
            "feature_levels": _read_levels(folder, config, facts, options, self.num_levels),
            "image_inputs": options.image_inputs or export_info(folder).get("image_inputs") or "embed",
            "target": facts.fingerprint,
            "target_path": facts.name,
        }

    def check_supported(self, folder: Path, config: EngineConfig, facts: TargetFacts) -> None:
        """Raises ValueError for what our head does not have."""
        _check_supported(folder, config, facts, self.row.imports)
        num_layers = config.get("num_hidden_layers", 1)
        if num_layers not in (1, facts.num_layers):  # some trainers copy the target's layer count; the tensors have one layer
            raise ValueError(f"{folder}: {config.key_path('num_hidden_layers')} is {num_layers}: our head has one layer")

    def read_rope(self, folder: Path, config: EngineConfig, facts: TargetFacts, options: ImportOptions) -> RopeConfig:
        """Returns the rope of a folder's config; ValueError unless it is the target's."""
        return _read_rope(folder, config, facts, options, self.has_axes)

    def norm_before_residual(self, folder: Path, config: EngineConfig) -> bool:
        """Returns whether the normed feature is the residual stream; ValueError if that is open."""
        return bool(config.raw.get("norm_before_residual", False))

    def draft_tensors(self, folder: Path, config: EngineConfig, facts: TargetFacts) -> dict[str, Tensor]:
        """Adds d2t and t2d where the folder omits them: our head always has both."""
        tensors = super().draft_tensors(folder, config, facts)
        return with_vocabulary_maps(tensors, len(tensors["lm_head.weight"]), facts.vocab_size, folder)

    @torch.no_grad()
    def outputs(self, draft: DraftHead) -> Tensor:
        """Returns logits [B, T, U]."""
        assert isinstance(draft, Eagle3Draft)
        embeds, levels, positions = fixed_batch(draft)
        return draft.lm_head(draft.norm(draft(embeds, draft.fc(levels), positions)))


def _counted(num_levels: int | None) -> str:
    return "any number of" if num_levels is None else f"exactly {num_levels}"


def _check_supported(folder: Path, config: EngineConfig, facts: TargetFacts, head: str) -> None:
    for key in UNSUPPORTED:
        if config.get(key):
            raise ValueError(
                f"{folder}: {config.key_path(key)} is {config.get(key)}: our {head} head does not support it, cannot import it"
            )
    for key in ("hidden_size", "vocab_size"):
        if config.size(key) != getattr(facts, key):
            raise ValueError(
                f"{folder}: {config.key_path(key)} is {config.get(key)}, that of the target ({facts.name or facts.model_type}) "
                f"is {getattr(facts, key)}; give the target it was trained for"
            )


def _read_rope(folder: Path, config: EngineConfig, facts: TargetFacts, options: ImportOptions, has_axes: bool) -> RopeConfig:
    rope = config.rope if has_axes else facts.rope._replace(theta=config.rope.theta, scaled=config.rope.scaled)
    if options.use_target_rope:
        return facts.rope
    if not rope.theta > 0:
        raise ValueError(f"{folder}: {config.key_path('rope_theta')} is not a positive number")
    if rope.scaled != facts.scaled_rope or rope.axes != facts.rope.axes:
        raise ValueError(
            f"{folder}: {config.key_path('rope_scaling')} is {rope.scaled or 'unscaled'} with mrope_section {rope.axes}, "
            f"the target's is {facts.scaled_rope or 'unscaled'} with {facts.rope.axes}: positions would differ from "
            f"training; --use-target-rope uses the target's"
        )
    return rope


def _read_levels(
    folder: Path, config: EngineConfig, facts: TargetFacts, options: ImportOptions, count: int | None
) -> list[int]:
    vllm, sglang = config.vllm_levels, config.sglang_levels
    if options.levels:
        levels = list(options.levels)
    elif vllm and sglang and vllm != sglang:
        raise ValueError(
            f"{folder / CONFIG}: {LEVELS_KEY} means hidden_states{vllm} to vLLM and, in eagle_config, hidden_states{sglang} to "
            f"SGLang; give the levels used in training: --levels A,B,C"
        )
    else:
        levels = vllm or sglang or default_levels(facts.num_layers)
    if _levels_error(levels, facts.num_layers, count):
        raise ValueError(
            f"{folder}: feature levels {levels}: need {'three ' if count else ''}increasing ones of 0..{facts.num_layers - 1}; "
            f"give --levels A,B,C"
        )
    return levels

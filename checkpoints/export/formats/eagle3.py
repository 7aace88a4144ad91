"""The `eagle3` format: one folder that both vLLM and SGLang load.

Feature levels: the default of both engines is not written. Other levels are written twice: vLLM uses
`eagle_aux_hidden_state_layer_ids` unchanged, SGLang reads the one in `eagle_config` and adds one. Levels 1, 4, 7:

    eagle_aux_hidden_state_layer_ids: [1, 4, 7]    eagle_config.eagle_aux_hidden_state_layer_ids: [0, 3, 6]

Folders of SpecForge, AngelSlim and SafeAILab are in this format too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from checkpoints.export.configs import (
    FEATURE_LEVELS,
    FUSED_NORMS,
    GIVE_LEVELS,
    LEVELS_KEY,
    EngineConfig,
    TensorSpec,
    TensorSpecs,
    as_mapping,
    default_levels,
    head_specs,
    layer_specs,
    levels_problem,
)
from checkpoints.export.folder import export_info
from checkpoints.export.format_checks import HEAD_NORMS, LAYER_CHECKS, check_tensors, single_layer, unsupported_residual
from checkpoints.export.formats.base import CheckInput, Checks, ExportFormat, fixed_batch, with_prefix
from checkpoints.export.formats.records import Finding, ImportOptions, Obstacle
from checkpoints.export.target import TargetFacts
from sage.drafts.eagle import Eagle3Config, Eagle3Draft
from sage.drafts.head import DraftHead

SAVED_LAYER = "layers.0."  # prefix of the layer's tensors in the folders of most trainers


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
    config, num_layers = given.config, given.facts.num_layers if given.facts else None
    count, default = given.format.num_levels, default_levels(num_layers) if num_layers else None
    if given.options and given.options.levels:
        chosen, count = list(given.options.levels), count or len(config.vllm_levels or range(FEATURE_LEVELS))
        if problem := levels_problem(chosen, num_layers, count):
            yield Finding("--levels", str(chosen), "", refusal=problem)
        return
    written = {"vLLM": config.vllm_levels, "llama.cpp": config.vllm_levels, "SGLang": config.sglang_levels}
    levels_of = {engine: written[engine] or default for engine in given.format.engines}
    for engine, read in levels_of.items():
        if read is not None and (effect := levels_problem(read, num_layers, count)):
            is_missing = given.options is not None and not written[engine] and any(written.values())
            refusal = "" if is_missing else f"{effect}; {GIVE_LEVELS}"
            yield Finding(LEVELS_KEY, f"{engine} reads hidden_states{read}", effect, refusal=refusal)
    if len({str(levels) for levels in levels_of.values()}) > 1:
        found = ", ".join(f"{engine} reads hidden_states{levels or ' default'}" for engine, levels in levels_of.items())
        effect = "one of the engines feeds it other features than in training: acceptance near 1.00"
        refusal = f"{GIVE_LEVELS}: those used in training" if all(written.values()) else ""
        yield Finding(f"{LEVELS_KEY} and eagle_config.{LEVELS_KEY}", found, effect, refusal=refusal)


def _null_target_size(given: CheckInput) -> Iterator[Finding]:
    key = "target_hidden_size"
    if given.config.raw.get(key, ...) is None:
        yield Finding(key, "null", "SGLang multiplies it by three and stops; omit the field")


def norms_of(config: EngineConfig) -> dict[str, bool]:
    """Returns which of the norms around fc and of the output a draft has; engines read the first from `eagle_config` too."""
    nested, first = as_mapping(config.raw.get("eagle_config")), HEAD_NORMS[0]
    return {key: bool(config.raw.get(key)) for key in HEAD_NORMS} | ({first: bool(nested[first])} if first in nested else {})


class Eagle3Format(ExportFormat):
    """EAGLE-3 drafts for vLLM and SGLang."""

    template = "eagle3"
    draft = Eagle3Draft
    expressed: ClassVar[tuple[str, ...]] = ("feature_levels", "draft_vocab_size", "norm_before_residual", *HEAD_NORMS)
    own_layer = layer = "midlayer."
    engine_class = "LlamaForCausalLMEagle3"
    other_classes: ClassVar[tuple[str, ...]] = ("Eagle3LlamaForCausalLM", "LlamaForCausalLM")  # AngelSlim's and SafeAILab's
    method = "eagle3"
    needs_t2d: ClassVar[bool] = False  # whether a reduced draft vocabulary needs t2d
    checks: ClassVar[Checks] = (
        *(*LAYER_CHECKS, single_layer, draft_vocabulary, _null_target_size),
        *(unsupported_residual, feature_levels, check_tensors),
    )

    def config_values(self, draft: Any, facts: TargetFacts) -> dict[str, Any]:
        levels, norms = list(draft.feature_levels), {key: True for key in HEAD_NORMS if getattr(draft, key)}
        values = super().config_values(draft, facts) | {"levels": levels, "num_levels": len(levels), **norms}
        if levels == default_levels(facts.num_layers):
            return values
        eagle_config = {LEVELS_KEY: [k - 1 for k in draft.feature_levels], "use_aux_hidden_state": True}
        return values | {"vllm_levels": levels, "eagle_config": eagle_config}

    def obstacles(self, draft: Any, facts: TargetFacts) -> Iterator[Obstacle]:
        if draft.norm_before_residual and "SGLang" in self.engines:
            remedy = "--format speculators serves it with vLLM"
            problem = "true, which SGLang does not support"
            yield Obstacle(key="draft.norm_before_residual", value="true", problem=problem, remedy=remedy)
        levels = list(draft.feature_levels)
        if levels_problem(levels, facts.num_layers, self.num_levels):
            counted = "any number of" if self.num_levels is None else f"exactly {self.num_levels}"
            problem = f"{levels} cannot be served: engines fuse {counted} increasing levels of 0..{facts.num_layers - 1}"
            yield Obstacle(key="draft.feature_levels", value=str(levels), problem=problem, remedy="train with such levels")

    def recognizes(self, config: EngineConfig) -> bool:
        return "draft_vocab_size" in config.raw or any("Eagle3" in name for name in config.classes)

    def specs(self, config: EngineConfig) -> TensorSpecs | None:
        if (sizes := config.sizes) is None:
            return None
        levels = FEATURE_LEVELS if self.num_levels else len(config.vllm_levels or range(FEATURE_LEVELS))
        layer = layer_specs(config, sizes, self.layer, FUSED_NORMS, self.layer_has(config))
        has = norms_of(config)
        norms = {"input_norm.weight": TensorSpec((levels * sizes.hidden,))} if has["norm_before_fc"] else {}
        norms |= {f"fc_norm.{i}.weight": TensorSpec((sizes.hidden,)) for i in range(levels) if has["fc_norm"]}
        return layer | norms | head_specs(config, sizes, levels, self.needs_t2d)

    def layer_has(self, config: EngineConfig) -> tuple[str, ...]:
        """Returns what a layer has besides that of EAGLE-3, as in `layer_specs`."""
        return ()

    def format_name(self, name: str) -> str:
        return with_prefix(super().format_name(name), SAVED_LAYER, self.layer)

    def draft_config(self, given: CheckInput, facts: TargetFacts, options: ImportOptions) -> Eagle3Config:
        return Eagle3Config(**self.config_fields(given, facts, options))

    def config_fields(self, given: CheckInput, facts: TargetFacts, options: ImportOptions) -> dict[str, Any]:
        """Returns the fields of our draft's configuration."""
        config = given.config
        levels = options.levels or config.vllm_levels or config.sglang_levels or default_levels(facts.num_layers)
        return {
            **self.head_fields(config, facts, options),
            "draft_vocab_size": config.size("draft_vocab_size") or facts.vocab_size,
            "norm_before_residual": bool(config.raw.get("norm_before_residual", False)),
            **norms_of(config),
            "feature_levels": list(levels),
            "image_inputs": options.image_inputs or export_info(given.folder).get("image_inputs") or "embed",
        }

    @torch.no_grad()
    def outputs(self, draft: DraftHead) -> Tensor:
        """Returns logits [B, 2 * T, U]: those of pairs, and of pairs with the first ones' outputs as features."""
        assert isinstance(draft, Eagle3Draft)
        embeds, levels, positions = fixed_batch(draft)
        first = draft(embeds, draft.combine(levels), positions)
        return draft.lm_head(draft.to_lm_head(torch.cat((first, draft(embeds, first, positions)), 1)))

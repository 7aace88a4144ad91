"""The `dflash` format: in the layout of the package speculators, and with `--flavour native` in DFlash's own.

The anchor's slot predicts nothing, slot k predicts the token k after the anchor. Ref: DFlash, arXiv 2602.06036; z-lab/dflash.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from checkpoints.export.configs import LEVELS_KEY, EngineConfig, TargetFacts, as_mapping
from checkpoints.export.formats.base import CheckInput, Finding, Obstacle
from checkpoints.export.formats.block import BlockFormat
from checkpoints.export.formats.block_checks import (
    BLOCK_CHECKS,
    NATIVE,
    NATIVE_LEVELS,
    as_integers,
    native_default,
    native_part,
)
from checkpoints.export.formats.layout import TYPE, layout, proposal
from sage.io.dtypes import dtype_name

ALGORITHM = "dflash"
SGLANG_TARGETS = ("llama", "qwen3", "qwen3_moe", "qwen3_vl")  # with `set_dflash_layers_to_capture` in SGLang 0.5.23


def _layout(given: CheckInput) -> Iterator[Finding]:
    if given.format.flavour is None:
        yield from layout(given)
        yield from proposal(given)
    else:
        yield from native_part(given)


class DFlashFormat(BlockFormat):
    """Block drafts whose first slot predicts nothing, with the target's lm_head."""

    method = ALGORITHM
    algorithm = ALGORITHM
    checks = (_layout, *BLOCK_CHECKS)
    is_anchored = False
    conditional, other_conditional, other_format = "none", "markov", "dspark"

    @property
    def is_native(self) -> bool:
        """Whether the layout is DFlash's own."""
        return self.flavour is not None

    @property
    def label(self) -> str:
        return f"{self.name} in its native layout" if self.is_native else self.name

    @property
    def engine_class(self) -> str:
        return "DFlashDraftModel" if self.is_native else "DFlashSpeculator"

    @property
    def first_level(self) -> int:
        """The lowest level that the layout has an id for."""
        return int(self.is_native)

    @property
    def levels_key(self) -> str:
        return NATIVE_LEVELS if self.is_native else super().levels_key

    @property
    def mask_token_key(self) -> str:
        return f"{NATIVE}.mask_token_id" if self.is_native else super().mask_token_key

    @property
    def causal_key(self) -> str:
        return f"{NATIVE}.causal" if self.is_native else super().causal_key

    def recognizes(self, config: EngineConfig) -> bool:
        if not self.is_native:
            return config.raw.get(TYPE) == ALGORITHM
        return TYPE not in config.raw and (NATIVE in config.raw or self.engine_class in config.classes)

    def written_levels(self, config: EngineConfig) -> Any:
        return _native(config, "target_layer_ids") if self.is_native else super().written_levels(config)

    def levels(self, config: EngineConfig) -> list[int] | None:
        written = super().levels(config)
        return [level + 1 for level in written] if written and self.is_native else written

    def second_levels(self, config: EngineConfig) -> tuple[str, list[int]] | None:
        if not self.is_native:
            return super().second_levels(config)
        found = as_integers(config.raw.get(LEVELS_KEY))
        return (LEVELS_KEY, found) if found else None

    def foreign_default(self, levels: list[int], num_layers: int) -> str:
        if not self.is_native:
            return super().foreign_default(levels, num_layers)
        written = [level - 1 for level in levels]
        shifted = [layer + 1 for layer in native_default(num_layers, len(levels))]
        return "speculators" if written in (shifted, [2, num_layers // 2, num_layers - 3]) else ""

    def mask_token(self, config: EngineConfig) -> Any:
        return _native(config, "mask_token_id") if self.is_native else super().mask_token(config)

    def causal_override(self, config: EngineConfig) -> bool | None:
        return _native(config, "causal") if self.is_native else super().causal_override(config)

    def has_causal_override(self, config: EngineConfig) -> bool:
        return self.causal_override(config) is not None if self.is_native else super().has_causal_override(config)

    def proposed_tokens(self, config: EngineConfig) -> Any:
        return None if self.is_native else super().proposed_tokens(config)

    def anchor_findings(self, given: CheckInput) -> Iterator[Finding]:
        key = "sample_from_anchor"
        if given.config.raw.get(key) or _native(given.config, key):
            effect = "vLLM's V2 runner refuses it and V1 shifts every token by one: a head that predicts in slot 0 is a DSpark"
            yield Finding(key, "true", effect)

    def config(self, draft: Any, facts: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
        if not self.is_native:
            return super().config(draft, facts, dtype)
        own = {
            "mask_token_id": draft.mask_token,
            "target_layer_ids": [level - 1 for level in draft.feature_levels],
            "causal": draft.causal,
        }
        return {
            "architectures": [self.engine_class],
            **self.layers_config(draft, facts, dtype),
            "torch_dtype": dtype_name(dtype),
            "block_size": draft.block_size,
            "num_target_layers": facts.num_layers,
            NATIVE: own,
        }

    def obstacles(self, draft: Any, facts: TargetFacts) -> Iterator[Obstacle]:
        yield from super().obstacles(draft, facts)
        if draft.confidence:
            remedy = "train with draft.confidence=false"
            yield Obstacle(key="draft.confidence", value="true", problem="DFlash has no such head", remedy=remedy)
        if not self.is_native:
            return
        if 0 in draft.feature_levels:
            problem = "contains 0, the embeddings, which are no output of a layer"
            remedy = "export without --flavour, or train without it"
            yield Obstacle(key="draft.feature_levels", problem=problem, remedy=remedy)
        if draft.draft_vocab_size != facts.vocab_size:
            problem = f"{draft.draft_vocab_size}: the native layout has no lm_head, SGLang takes the target's"
            yield Obstacle(key="draft.draft_vocab_size", problem=problem, remedy="export without --flavour")

    def served_by(self, facts: TargetFacts) -> tuple[str, ...]:
        vllm = tuple(engine for engine in facts.served_by if engine != "SGLang")
        return (*vllm, "SGLang") if self.is_native and facts.model_type in SGLANG_TARGETS else vllm

    def serve_command(self, engine: str, target: str, draft: str, tokens: int = 1) -> str:
        """vLLM reads target and settings from a speculator's config; SGLang reads the size of a block."""
        if not self.is_native:
            return f"vllm serve {draft}"
        if engine == "vLLM":
            return super().serve_command(engine, target, draft, tokens)
        return (
            f"python -m sglang.launch_server --model-path {target} \\\n"
            f"  --speculative-algorithm {self.method.upper()} --speculative-draft-model-path {draft}"
        )


def _native(config: EngineConfig, key: str) -> Any:
    """Returns a field of the layout's own part; None if it is missing."""
    return as_mapping(config.raw.get(NATIVE)).get(key)

"""The `dflash` format: in the layout of the package speculators, and with `--flavour native` in DFlash's own.

The anchor's slot predicts nothing, slot k predicts the token k after the anchor. Ref: DFlash, arXiv 2602.06036; z-lab/dflash.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from checkpoints.export.configs import EngineConfig
from checkpoints.export.formats.base import TYPE, CheckInput, Checks
from checkpoints.export.formats.block import BlockFormat
from checkpoints.export.formats.block_checks import (
    ANCHOR,
    NATIVE_LAYOUT,
    NATIVE_PART,
    SPECULATORS_LAYOUT,
    BlockLayout,
    block_checks,
    lookup,
    native_part,
)
from checkpoints.export.formats.records import Finding, Obstacle
from checkpoints.export.formats.speculators import SPECULATORS_CHECKS
from checkpoints.export.target import TargetFacts
from sage.io.dtypes import dtype_name

SGLANG_TARGETS = ("llama", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_5")  # with `set_dflash_layers_to_capture` in SGLang 0.5.23
CLASSES = {None: "DFlashSpeculator", "native": "DFlashDraftModel"}


def _anchor(given: CheckInput) -> Iterator[Finding]:
    if given.config.raw.get(ANCHOR) or lookup(given.config.raw, f"{NATIVE_PART}.{ANCHOR}"):
        effect = "vLLM's V2 runner refuses it and V1 shifts every token by one: a head that predicts in slot 0 is a DSpark"
        yield Finding(ANCHOR, "true", effect)


class DFlashFormat(BlockFormat):
    """Block drafts whose first slot predicts nothing, with the target's lm_head."""

    method = algorithm = "dflash"
    conditional, other_conditional, other_format = "none", "markov", "dspark"
    sglang_tree = ""  # SGLang reads the size of a block

    @property
    def is_native(self) -> bool:
        """Whether the layout is DFlash's own."""
        return self.flavour is not None

    @property
    def label(self) -> str:
        return f"{self.name} in its native layout" if self.is_native else self.name

    @property
    def engine_class(self) -> str:
        return CLASSES["native" if self.is_native else None]

    @property
    def layout(self) -> BlockLayout:
        return NATIVE_LAYOUT if self.is_native else SPECULATORS_LAYOUT

    @property
    def checks(self) -> Checks:
        first = (native_part,) if self.is_native else SPECULATORS_CHECKS
        return (*first, *block_checks(self.layout), _anchor)

    @property
    def names_target(self) -> bool:  # type: ignore[override]
        return not self.is_native

    def recognizes(self, config: EngineConfig) -> bool:
        if not self.is_native:
            return super().recognizes(config)
        return TYPE not in config.raw and (NATIVE_PART in config.raw or self.engine_class in config.classes)

    def config(self, draft: Any, facts: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
        if not self.is_native:
            return super().config(draft, facts, dtype)
        own = {
            "mask_token_id": draft.mask_token,
            "target_layer_ids": [level - self.layout.first_level for level in draft.feature_levels],
            "causal": draft.causal,
        }
        return {
            "architectures": [self.engine_class],
            **self.layers_config(draft, facts, dtype),
            "torch_dtype": dtype_name(dtype),
            "block_size": draft.block_size,
            "num_target_layers": facts.num_layers,
            NATIVE_PART: own,
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

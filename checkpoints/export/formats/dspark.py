"""The `dspark` format: blocks that predict from the anchor on, with a low-rank correction by the token before, for vLLM.

Ref: DSpark, arXiv 2607.05147. `sample_from_anchor` is always written: without it vLLM reads false, speculators true.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from checkpoints.export.configs import EngineConfig, TensorSpec, TensorSpecs
from checkpoints.export.format_checks import UNSUPPORTED, Field, check_fields, is_size, one_of
from checkpoints.export.formats.base import CheckInput, Checks
from checkpoints.export.formats.block import BlockFormat
from checkpoints.export.formats.block_checks import ANCHOR, SPECULATORS_LAYOUT
from checkpoints.export.formats.records import Finding
from checkpoints.export.target import TargetFacts

RANK, HEAD, CONFIDENCE, WITH_MARKOV = "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"
NO_ANCHOR = "vLLM takes a missing one for false, speculators for true: all tokens shift by one"
NO_RANK = "vLLM's class needs the markov head; a draft without one is a DFlash"
OTHER_HEAD = "vLLM computes the vanilla head, whatever was trained, or stops at an unknown name"
FIELDS = (
    Field(ANCHOR, one_of(True, False), "true or false", NO_ANCHOR, is_top=True),
    Field(RANK, is_size, "a positive integer", NO_RANK, is_top=True, refusal=UNSUPPORTED),
    Field(HEAD, one_of("vanilla"), "'vanilla'", OTHER_HEAD, is_top=True, refusal=UNSUPPORTED),
)


def _heads(given: CheckInput) -> Iterator[Finding]:
    yield from check_fields(given, FIELDS)
    raw = given.config.raw
    if given.options and raw.get(CONFIDENCE) and not raw.get(WITH_MARKOV):
        yield Finding(WITH_MARKOV, "not true", "", refusal="our confidence head reads both, cannot import it")


class DSparkFormat(BlockFormat):
    """Block drafts with a markov head, whose first slot predicts too."""

    method = algorithm = "dspark"
    engine_class = "DSparkSpeculator"
    other_classes = ("DSparkDraftModel", "Qwen3DSparkModel")
    # vLLM reads `sliding_window_non_causal` for other kinds only
    layout = replace(SPECULATORS_LAYOUT, causal="", is_anchored=True, reads_mask_file=False)
    names_target = True
    environment = "VLLM_USE_V2_MODEL_RUNNER=1 "
    conditional, other_conditional, other_format = "markov", "none", "dflash"

    @property
    def checks(self) -> Checks:
        return (*super().checks, _heads)

    def own_specs(self, config: EngineConfig) -> TensorSpecs:
        rank, vocab, hidden = config.size(RANK) or 1, config.size("vocab_size") or 1, config.size("hidden_size") or 1
        specs = {
            "markov_head.markov_w1.weight": TensorSpec((vocab, rank)),
            "markov_head.markov_w2.weight": TensorSpec((config.size("draft_vocab_size") or vocab, rank)),
        }
        if config.raw.get(CONFIDENCE):
            size = hidden + (rank if config.raw.get(WITH_MARKOV) else 0)
            specs |= {"confidence_head.proj.weight": TensorSpec((1, size)), "confidence_head.proj.bias": TensorSpec((1,))}
        return specs

    def config(self, draft: Any, facts: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
        heads = {RANK: draft.conditional_rank, HEAD: "vanilla", CONFIDENCE: draft.confidence, WITH_MARKOV: draft.confidence}
        return super().config(draft, facts, dtype) | heads

    def warnings(self, draft: Any, facts: TargetFacts) -> list[str]:
        needs = "vLLM 0.32 serves DSpark drafts with VLLM_USE_V2_MODEL_RUNNER=1 only, which does not run on a CPU."
        return [*super().warnings(draft, facts), needs]

    def heads(self, config: EngineConfig) -> dict[str, Any]:
        has_confidence = bool(config.raw.get(CONFIDENCE))
        return {"conditional": self.conditional, "conditional_rank": config.size(RANK), "confidence": has_confidence}

"""The `dspark` format: blocks that predict from the anchor on, with a low-rank correction by the token before, for vLLM.

Ref: DSpark, arXiv 2607.05147. `sample_from_anchor` is always written: without it vLLM reads false, speculators true.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from checkpoints.export.configs import EngineConfig, TargetFacts, TensorSpec, TensorSpecs
from checkpoints.export.folder import CONFIG
from checkpoints.export.formats.base import CheckInput, Finding
from checkpoints.export.formats.block import BlockFormat
from checkpoints.export.formats.block_checks import BLOCK_CHECKS
from checkpoints.export.formats.layout import TYPE, layout, proposal

ALGORITHM = "dspark"
ANCHOR = "sample_from_anchor"
RANK, HEAD, CONFIDENCE, WITH_MARKOV = "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"


def _heads(given: CheckInput) -> Iterator[Finding]:
    config = given.config
    if config.size(RANK) is None:
        effect = "vLLM's class needs the markov head; a draft without one is a DFlash"
        yield Finding(RANK, f"{config.raw.get(RANK)!r}, expected a positive integer", effect)
    if config.raw.get(HEAD) != "vanilla":
        found = f"{config.raw.get(HEAD)!r}, expected 'vanilla'"
        yield Finding(HEAD, found, "vLLM computes the vanilla head, whatever was trained, or stops at an unknown name")


class DSparkFormat(BlockFormat):
    """Block drafts with a markov head, whose first slot predicts too."""

    method = ALGORITHM
    algorithm = ALGORITHM
    engine_class = "DSparkSpeculator"
    other_classes = ("DSparkDraftModel", "Qwen3DSparkModel")
    checks = (layout, proposal, *BLOCK_CHECKS, _heads)
    is_anchored = True
    reads_mask_file = False
    conditional, other_conditional, other_format = "markov", "none", "dflash"

    def recognizes(self, config: EngineConfig) -> bool:
        return config.raw.get(TYPE) == ALGORITHM

    def anchor_findings(self, given: CheckInput) -> Iterator[Finding]:
        written = given.config.raw.get(ANCHOR)
        if not isinstance(written, bool):
            effect = "vLLM takes a missing one for false, speculators for true: all tokens shift by one"
            yield Finding(ANCHOR, f"{written!r}, expected true or false", effect)

    def drafted(self, block_size: int) -> int:
        return block_size

    def causal_override(self, config: EngineConfig) -> bool | None:
        """vLLM reads `sliding_window_non_causal` for other kinds only."""
        return None

    def head_specs(self, config: EngineConfig) -> TensorSpecs:
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

    def head_fields(self, config: EngineConfig) -> dict[str, Any]:
        has_confidence = bool(config.raw.get(CONFIDENCE))
        return {"conditional": self.conditional, "conditional_rank": config.size(RANK), "confidence": has_confidence}

    def check_supported(self, folder: Path, config: EngineConfig, facts: TargetFacts, levels: list[int]) -> None:
        super().check_supported(folder, config, facts, levels)
        if config.size(RANK) is None or config.raw.get(HEAD) != "vanilla":
            found = f"{RANK} is {config.raw.get(RANK)!r} and {HEAD} {config.raw.get(HEAD)!r}"
            raise ValueError(f"{folder / CONFIG}: {found}: our block head has the vanilla one; cannot import it")
        if config.raw.get(CONFIDENCE) and not config.raw.get(WITH_MARKOV):
            raise ValueError(f"{folder / CONFIG}: {WITH_MARKOV} is not true: our confidence head reads both; cannot import it")

    def serve_command(self, engine: str, target: str, draft: str, tokens: int = 1) -> str:
        """vLLM reads target and settings from the config."""
        return f"VLLM_USE_V2_MODEL_RUNNER=1 vllm serve {draft}"

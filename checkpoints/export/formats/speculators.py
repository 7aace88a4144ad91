"""The `speculators` format, served by vLLM: the tensors of `eagle3` under `layers.0` and a self-contained config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from checkpoints.export.checks import LAYER_CHECKS, single_layer
from checkpoints.export.configs import LEVELS_KEY, EngineConfig, TargetFacts, layer_config
from checkpoints.export.folder import CONFIG
from checkpoints.export.formats.base import SPECULATIVE_TOKENS, CheckInput, Checks, Finding
from checkpoints.export.formats.eagle3 import Eagle3Format, draft_vocabulary, feature_levels
from checkpoints.export.formats.layout import layout, proposal, speculator_config
from checkpoints.export.tensor_checks import check_tensors, vocabulary_maps
from sage.io.dtypes import dtype_name

ALGORITHM = "eagle3"


def _residual(given: CheckInput) -> Iterator[Finding]:
    raw = given.config.raw
    if "norm_before_residual" not in raw:
        yield Finding("norm_before_residual", "missing", "vLLM's default is true, the draft was trained with false")
    elif raw["norm_before_residual"] is not False:
        yield Finding("norm_before_residual", f"{raw['norm_before_residual']}", "only vLLM supports it", is_warning=True)


class SpeculatorsFormat(Eagle3Format):
    """EAGLE-3 drafts in the layout of the package `speculators`."""

    layer = "layers.0."
    engine_class = "Eagle3DraftModel"
    layer_types = ("llama", "qwen3")
    has_embedding = True
    needs_t2d = True
    algorithm = ALGORITHM
    checks: ClassVar[Checks] = (
        *(*LAYER_CHECKS, single_layer, draft_vocabulary, layout, _residual, proposal, feature_levels),
        *(check_tensors, vocabulary_maps),
    )

    def config(self, draft: Any, facts: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
        """Without a top-level model_type: readers recognize a speculator by `speculators_model_type`."""
        layer = {"model_type": "llama", **layer_config(draft, facts), "torch_dtype": dtype_name(dtype)}
        return {
            **speculator_config(self.algorithm, self.engine_class, facts, self.speculative_tokens(draft), dtype),
            "draft_vocab_size": draft.draft_vocab_size,
            "norm_before_residual": draft.norm_before_residual,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            LEVELS_KEY: list(draft.feature_levels),
            "transformer_layer_config": layer,
        }

    def recognizes(self, config: EngineConfig) -> bool:
        return "speculators_model_type" in config.raw or self.engine_class in config.classes

    def norm_before_residual(self, folder: Path, config: EngineConfig) -> bool:
        if "norm_before_residual" not in config.raw:
            raise ValueError(
                f"{folder / CONFIG}: norm_before_residual is missing: engines assume true, others false; add the value used in "
                f"training"
            )
        return super().norm_before_residual(folder, config)

    def serve_command(self, engine: str, target: str, draft: str, tokens: int = SPECULATIVE_TOKENS) -> str:
        """vLLM reads target and settings from the config."""
        return f"vllm serve {draft}"

"""The `speculators` format, served by vLLM: the tensors of `eagle3` under `layers.0` and a self-contained config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from checkpoints.export.config_checks import LAYER_CHECKS, NORMS, single_layer
from checkpoints.export.configs import LEVELS_KEY, EngineConfig, TargetFacts, layer_config
from checkpoints.export.formats.base import TYPE, CheckInput, Checks
from checkpoints.export.formats.eagle3 import Eagle3Format, draft_vocabulary, feature_levels
from checkpoints.export.formats.layout import SPECULATORS_CHECKS, speculator_config
from checkpoints.export.formats.records import Finding
from checkpoints.export.tensor_checks import check_tensors
from sage.io.dtypes import dtype_name


def residual(given: CheckInput) -> Iterator[Finding]:
    """Yields the finding about a residual stream that is not specified, or that vLLM alone supports."""
    key, raw = "norm_before_residual", given.config.raw
    if key not in raw:
        effect = "vLLM's default is true, the draft was trained with false"
        yield Finding(key, "missing", effect, refusal="engines assume true, others false; add the value used in training")
    elif raw[key] is not False:
        yield Finding(key, f"{raw[key]}", "only vLLM supports it", is_warning=True)


class SpeculatorsFormat(Eagle3Format):
    """EAGLE-3 drafts in the layout of the package `speculators`."""

    layer = "layers.0."
    engine_class = "Eagle3DraftModel"
    other_classes: ClassVar[tuple[str, ...]] = ()
    layer_types = ("llama", "qwen3")
    has_embedding = True
    needs_t2d = True
    names_target = True
    algorithm = "eagle3"
    checks: ClassVar[Checks] = (
        *(*LAYER_CHECKS, single_layer, draft_vocabulary, *SPECULATORS_CHECKS),
        *(residual, feature_levels, check_tensors),
    )

    def config(self, draft: Any, facts: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
        """Without a top-level model_type: readers recognize a speculator by `speculators_model_type`."""
        layer = {"model_type": "llama", **layer_config(draft, facts), "torch_dtype": dtype_name(dtype)}
        return {
            **speculator_config(self.algorithm, self.engine_class, facts, self.speculative_tokens(draft), dtype),
            "draft_vocab_size": draft.draft_vocab_size,
            "norm_before_residual": draft.norm_before_residual,
            **{key: getattr(draft, key) for key in NORMS},
            LEVELS_KEY: list(draft.feature_levels),
            "transformer_layer_config": layer,
        }

    def recognizes(self, config: EngineConfig) -> bool:
        return TYPE in config.raw or self.engine_class in config.classes

"""The `eagle` format (EAGLE-1/2) in one flavour per engine: vLLM's fc has no bias, SGLang's has one (written as zeros).

Neither has a norm at the input of its attention; vLLM with our plugin does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from checkpoints.export.configs import NORMS, EngineConfig, TensorSpec, TensorSpecs, layer_specs
from checkpoints.export.format_checks import LAYER_CHECKS, check_tensors, single_layer, unsupported_residual
from checkpoints.export.formats.base import CheckInput, ExportFormat, fixed_batch
from checkpoints.export.formats.records import ImportOptions, Obstacle
from checkpoints.export.target import EMBEDDING, TargetFacts
from checkpoints.vllm_plugin import EAGLE_WITH_NORM
from sage.drafts.eagle import EagleConfig, EagleDraft
from sage.drafts.head import DraftHead

SGLANG, PLUGIN = "sglang", "plugin"
CLASSES = {"vllm": "EagleLlamaForCausalLM", SGLANG: "LlamaForCausalLMEagle", PLUGIN: EAGLE_WITH_NORM}
NO_BIAS = "SGLang's fc has a bias and keeps a random one: acceptance falls to 1.00"


class EagleFormat(ExportFormat):
    """EAGLE-1/2 drafts: features instead of logits, the target's lm_head, no norms at the input and the output."""

    template = "eagle"
    draft = EagleDraft
    checks = (*LAYER_CHECKS, single_layer, unsupported_residual, check_tensors)
    expressed = ("input_norm",)
    own_layer, layer = "layer.", "layers.0."
    method = "eagle"
    effect_of_unexpected = "the engine skips it without a message: it serves something else than was trained"
    output = "feature"

    @property
    def engine_class(self) -> str:
        return CLASSES[self.flavour or SGLANG]

    @property
    def _has_norm(self) -> bool:
        return self.flavour == PLUGIN

    def needs_plugin(self, facts: TargetFacts) -> bool:
        return self._has_norm or super().needs_plugin(facts)

    def tensors(self, state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        bias = {"fc.bias": torch.zeros(len(state["fc.weight"]), dtype=dtype)} if self.flavour == SGLANG else {}
        return super().tensors(state, dtype) | bias

    def obstacles(self, draft: Any, facts: TargetFacts) -> Iterator[Obstacle]:
        if draft.input_norm and not self._has_norm:
            layer = "the engines' `eagle` layer has no input_layernorm"
            problem = f"true, but {layer}, so its attention's input would differ from training"
            remedy = "train with draft.input_norm=false, or export with --flavour plugin for vLLM with our plugin"
            yield Obstacle(key="draft.input_norm", value="true", problem=problem, remedy=remedy)
        if self._has_norm and not draft.input_norm:
            problem = "the draft has no norm at the input of its attention, which this flavour adds"
            yield Obstacle(key="--flavour plugin", problem=problem, remedy="give --flavour vllm")

    def warnings(self, draft: Any, facts: TargetFacts) -> list[str]:
        if self.flavour != SGLANG or not facts.mrope_section:
            return []
        return ["SGLang's EAGLE-1/2 layer uses plain text positions, not M-RoPE: after an image they differ from training."]

    def specs(self, config: EngineConfig) -> TensorSpecs | None:
        if (sizes := config.sizes) is None:
            return None
        hidden = sizes.hidden
        bias = TensorSpec((hidden,), is_zero=True, effect_if_missing=NO_BIAS)
        return {
            **layer_specs(config, sizes, self.layer, norms=NORMS if self._has_norm else NORMS[1:]),
            "fc.weight": TensorSpec((hidden, 2 * hidden)),
            EMBEDDING: TensorSpec((sizes.vocab, hidden), is_optional=True),
            **({"fc.bias": bias} if self.flavour == SGLANG else {}),
        }

    def draft_config(self, given: CheckInput, facts: TargetFacts, options: ImportOptions) -> EagleConfig:
        fields = self.head_fields(given.config, facts, options)
        return EagleConfig(**fields, input_norm=self._has_norm, image_inputs=options.image_inputs or "embed")

    @torch.no_grad()
    def outputs(self, draft: DraftHead) -> Tensor:
        """Returns the predicted features [B, T, D]."""
        embeds, levels, positions = fixed_batch(draft)
        return draft(embeds, levels[..., : draft.config.hidden_size], positions)

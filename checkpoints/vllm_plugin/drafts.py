"""Our drafts as vLLM computes them, driven by its EAGLE proposer."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM


class EagleNormLlamaForCausalLM(EagleLlamaForCausalLM):
    """EAGLE-1/2 with a norm at the input of the attention, `draft=eagle` as it is trained by default."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model.layers[0].input_layernorm = RMSNorm(self.config.hidden_size, eps=self.config.rms_norm_eps)

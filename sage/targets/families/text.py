"""Text models without images: Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from transformers import AutoModelForCausalLM

from sage.targets.family import Family


class Text(Family):
    """A causal language model with plain or scaled rope; its chat template takes strings."""

    model_types = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
    }
    auto_class = AutoModelForCausalLM
    wants_text = True
    template_arguments = {"enable_thinking": False}  # of Qwen3, whose last answer has an empty block of thoughts otherwise

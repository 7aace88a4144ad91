"""Text models without images: Llama, Qwen2, Qwen3, and Mistral."""

from __future__ import annotations

from typing import ClassVar

from transformers import AutoModelForCausalLM

from sage.targets.family import Family


class Text(Family):
    """A causal language model with plain or scaled rope; its chat template takes strings."""

    model_types = {
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
    }
    auto_class = AutoModelForCausalLM
    served_by: ClassVar[tuple[str, ...]] = ("vLLM", "SGLang")
    wants_text = True
    template_arguments = {"enable_thinking": False}  # of Qwen3, whose last answer has an empty block of thoughts otherwise


class Mistral(Text):
    """Mistral, whose first version has sliding windows (see `sage.targets.family`)."""

    model_types = {"mistral": "MistralForCausalLM"}
    served_by = ("vLLM",)

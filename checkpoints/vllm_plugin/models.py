"""vLLM's classes of targets with the interfaces of drafts, each made when vLLM asks for it by name, and our draft in vLLM."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle, SupportsEagle3
from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from checkpoints.vllm_plugin import PLUGIN, TARGETS, logger

# Folders saved by transformers 5 name the vision tower's weights without `vision_model`, published ones and vLLM with it.
TOWER_NAMES = WeightsMapper(
    orig_to_new_regex={re.compile(r"^(model\.)?vision_tower\.(?!vision_model\.)"): "vision_tower.vision_model."}
)
WITH_TOWER_NAMES = ("llava_next", "llava_onevision")


class DraftTarget:
    """Adds what vLLM's proposer reads of a target."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        logger.info("%s: drafts for %s", PLUGIN, type(self).__name__)
        released: Any = self
        if not hasattr(released.config, "image_token_index"):
            released.config.image_token_index = released.config.image_token_id
        text = released.get_language_model()
        if isinstance(text, EagleModelMixin):  # Idefics3 has the layers alone; plain attributes are no further submodules
            object.__setattr__(text, "model", text)
            object.__setattr__(text, "lm_head", released.lm_head)


def __getattr__(name: str) -> type:
    """Returns the class of an architecture."""
    if name not in TARGETS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, class_name = TARGETS[name].partition(".")
    released: Any = getattr(import_module(f"vllm.model_executor.models.{module}"), class_name)
    fields: dict[str, Any] = {"__module__": __name__}
    if module in WITH_TOWER_NAMES:
        fields["hf_to_vllm_mapper"] = released.hf_to_vllm_mapper | TOWER_NAMES
    made = type(name, (DraftTarget, released, SupportsEagle, SupportsEagle3), fields)
    globals()[name] = made
    return made


class EagleNormLlamaForCausalLM(EagleLlamaForCausalLM):
    """EAGLE-1/2 with a norm at the input of the attention, `draft=eagle` as it is trained by default."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model.layers[0].input_layernorm = RMSNorm(self.config.hidden_size, eps=self.config.rms_norm_eps)

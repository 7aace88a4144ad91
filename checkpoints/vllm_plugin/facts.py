"""Names, and what the plugin knows of vLLM; also read by the commands that start vLLM in another environment."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.sage_draft")  # below vLLM's own logger, which has handlers once plugins are loaded
PLUGIN = "sage-draft"  # of the entry point
INSTALL_PLUGIN = "python -m pip install --no-deps sage-draft"  # in the environment of vLLM
RELEASES = ("0.32",)  # the releases that tests/engines ran with
EAGLE_WITH_NORM = "EagleNormLlamaForCausalLM"  # a draft's architecture
TARGETS = {  # architecture -> vLLM's class
    "Idefics3ForConditionalGeneration": "idefics3.Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration": "interns1.InternS1ForConditionalGeneration",
    "LlavaNextForConditionalGeneration": "llava_next.LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration": "llava_onevision.LlavaOnevisionForConditionalGeneration",
    "Qwen2VLForConditionalGeneration": "qwen2_vl.Qwen2VLForConditionalGeneration",
    "SmolVLMForConditionalGeneration": "smolvlm.SmolVLMForConditionalGeneration",
}


def is_known(release: str) -> bool:
    """Returns whether the plugin changes this release of vLLM."""
    return ".".join(release.split(".")[:2]) in RELEASES

